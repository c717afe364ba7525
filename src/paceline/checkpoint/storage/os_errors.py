"""What the system refuses, in words: what could not be done to which file, why, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import StorageError

_ADVICE = {
    errno.ENOSPC: "Free some space or choose another folder, then resume.",
    errno.EDQUOT: "Free some of your quota or choose another folder, then resume.",
    errno.EROFS: "Make the file system writable or choose another folder.",
    errno.EACCES: "Give this user the right to it or choose another folder.",
    errno.EPERM: "Give this user the right to it or choose another folder.",
    errno.ENOENT: "Something removed it meanwhile: is the disk still mounted?",
    errno.ENOTDIR: "A part of this path is a file: move it away or choose another folder.",
    errno.ESTALE: "The file system went away: mount it again, then resume.",
    errno.EIO: "The disk or the network behind it fails: look at the system's log.",
}


@contextmanager
def explained(verb: str, path: str) -> Iterator[None]:
    """What the system refuses inside becomes a ``StorageError``."""
    try:
        yield
    except OSError as error:
        raise storage_error(verb, path, error) from error


def storage_error(verb: str, path: str, error: OSError) -> StorageError:
    """The error for "cannot ``verb`` ``path``" because of ``error``."""
    cause = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    if error.errno == errno.EEXIST:
        advice = "It is there already: another process works on this folder?"
    else:
        advice = _ADVICE.get(error.errno or 0, "Put this right or choose another folder.")
    writing = verb in ("write", "make the folder")
    untouched = "Earlier checkpoints are untouched. " if writing else ""
    return StorageError(
        f"cannot {verb} {path}: {cause}. {untouched}{advice}",
        unreadable=verb == "read" and error.errno in (errno.EIO, errno.EBADMSG, errno.ENODATA),
    )
