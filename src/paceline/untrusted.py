"""Reading, adding to and showing what others wrote: the files of a run, text from other machines.

A run folder, a checkpoint or a message may come from anybody. So files are opened only where they
are regular ones (opening a FIFO would wait forever), no more is read than such a file can hold,
JSON is parsed with its traps refused, nothing is written to where a link leads, and what is shown
on a terminal is printable.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import unicodedata
from collections.abc import Iterator
from typing import Any, BinaryIO

MIB = 1024 * 1024
MOST_CONFIG_BYTES = 128 * 1024
"""The largest config: a YAML parser takes seconds for such a one."""
_CHUNK = MIB

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotReadable(OSError):
    """A path that is no regular file, or one that is larger than its kind can be.

    Has no ``errno``: the system did not refuse, we did. ``str()`` is the reason, without the path,
    which is its ``filename``.
    """

    def __init__(self, reason: str, path: str | os.PathLike[str]) -> None:
        super().__init__(reason)
        self.strerror = reason
        self.filename = os.fspath(path)

    def __str__(self) -> str:
        return str(self.strerror)


def open_descriptor(path: str | os.PathLike[str], most: int | None = None) -> int:
    """A descriptor for reading the regular file ``path``; never waits for whoever would write it.

    Raises ``NotReadable`` for anything but a regular file, and for one of more than ``most``
    bytes.
    """
    # A FIFO is opened at once, too, and then seen to be one; regular files do not mind the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = _regular(descriptor, path)
        if most is not None and found.st_size > most:
            raise NotReadable(
                f"it has {found.st_size:,} bytes; a file of this kind has at most {most:,} bytes",
                path,
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _regular(descriptor: int, path: str | os.PathLike[str]) -> os.stat_result:
    """What the system knows of a regular file; anything else is refused."""
    found = os.fstat(descriptor)
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise NotReadable(f"it is {_KINDS.get(kind, 'something else')}, not a file", path)
    return found


def open_to_append(path: str | os.PathLike[str], mode: int = 0o666) -> int:
    """A descriptor for reading ``path`` and for adding to it; the file is made where it is missing.

    Raises ``NotReadable`` for a link, so that nothing is written to where it leads, and for
    anything else but a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise NotReadable("it is a link, not a file", path) from None
        raise
    try:
        _regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is the owner's alone, in place of whatever had that name before.

    The file is always a new one: a link of that name is replaced, never followed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def open_file(path: str | os.PathLike[str], most: int | None = None) -> BinaryIO:
    """The same as ``open_descriptor``, as a file object."""
    return os.fdopen(open_descriptor(path, most), "rb")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of a regular file, which may have ``most`` at most."""
    with open_file(path, most) as file:
        data = file.read(most + 1)  # it may have grown since it was opened
    if len(data) > most:
        raise NotReadable(f"it has more than {most:,} bytes, the most for its kind", path)
    return data


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """The text of a regular file in UTF-8; ``UnicodeDecodeError`` (a ``ValueError``) where not."""
    return read_bytes(path, most).decode("utf-8")


def read_lines(file: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """The lines of a file without their ends; ``None`` for one of more than ``longest`` bytes."""
    partial, too_long = b"", False
    while chunk := file.read(_CHUNK):
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            whole, partial = partial + line, b""
            yield None if too_long or len(whole) > longest else whole
            too_long = False
        if not too_long:
            partial += rest
        if len(partial) > longest:
            partial, too_long = b"", True
    if partial or too_long:
        yield None if too_long else partial


def parse_json(text: str | bytes) -> Any:
    """The value in ``text``; whatever is wrong with it is a ``ValueError`` that says so.

    Stricter than ``json.loads``: a key given twice is refused (which one would count?), and so
    is nesting deeper than the parser can follow. NaN and infinity pass, since Python writes them.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def printable(text: object, *, one_line: bool = False) -> str:
    r"""``text`` as it may be shown on a terminal: what is not printable is written as an escape.

    Control characters (so that no escape sequence gets through), marks that turn the direction of
    writing, invisible characters and lone surrogates become ``\x1b``, ``\u202e`` and the like.
    Line ends and tabs stay, except where the text is to be ``one_line``.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "" if one_line else "\n\t"
    return "".join(c if c.isprintable() or c in kept or _is_space(c) else _escape(c) for c in text)


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
