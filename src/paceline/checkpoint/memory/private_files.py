"""Only what this user alone could have put there: shared memory is a folder that all may write to.

Anybody on the machine can make a folder under the name of a run's, before the run does. So owner
and mode are looked at before anything in it is read, written or removed. What was found to be this
user's stays so: in a sticky folder nobody else can put another one in its place.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from paceline.checkpoint.storage.os_errors import explained
from paceline.errors import CheckpointError


def check_private(folder: Path) -> bool:
    """Whether there is such a folder; raises unless it is this user's, and closed to others."""
    try:
        found = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if problem := _folder_problem(found) or _root_problem(folder.parent):
        raise CheckpointError(
            f"{folder} {problem}: nothing in it is read, and no snapshot is put there. Remove it, "
            "or switch the snapshots in memory off (checkpoint.memory_every: null)."
        )
    return True


def is_private(folder: Path) -> bool:
    """Whether there is such a folder, this user's and closed to others."""
    try:
        return check_private(folder)
    except CheckpointError:
        return False


def open_private(path: Path) -> int:
    """A descriptor of a file of this user's, for reading; raises where it is anything else."""
    with explained("read", str(path)):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return handle
    os.close(handle)
    raise CheckpointError(f"{path} {_owner(found)}, or is no file: it is not read.")


def read_private(path: Path) -> bytes:
    """All bytes of a file of this user's."""
    with os.fdopen(open_private(path), "rb") as file, explained("read", str(path)):
        return file.read()


def _folder_problem(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return f"is a link, which {_owner(found)}"
    if not stat.S_ISDIR(found.st_mode):
        return f"is no folder, and {_owner(found)}"
    if found.st_uid != os.geteuid():
        return f"{_owner(found)}, not to {_name(os.geteuid())}"
    if found.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _root_problem(root: Path) -> str:
    mode = os.stat(root).st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return f"is in {root}, where others could put something in its place (it is not sticky)"
    return ""


def _owner(found: os.stat_result) -> str:
    return f"belongs to user {_name(found.st_uid)}"


def _name(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)
