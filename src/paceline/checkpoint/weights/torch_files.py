"""Reading what ``torch.save`` wrote: the right bytes or a refusal, and no code executed.

torch maps a zip file without looking at how its entries are stored, and compares no checksum. So
the file is looked at first, by Python's own reader, and torch is given only what both understand
alike.
"""

from __future__ import annotations

import contextlib
import os
import pickletools
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError

_MAGIC = b"PK\x03\x04"
"""How a zip file begins: what torch itself goes by."""
_END = b"PK\x05\x06"
_END_SIZE = 22
_ENCRYPTED = 0x1
_CHUNK = 1024 * 1024
_HARMLESS = re.compile(r"collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.\w*Storage")
_ANEW = "Save it anew with torch.save, in the program that made it."


class WithoutEffect:
    """Stands for an object of another program in a file: what it was made of, and no code."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def load_torch_file(path: Path, without_effect: tuple[str, ...] = ()) -> Any:
    """What a file of torch's holds; tensors of a newer one are mapped, not read.

    Refused: files that need code to be loaded, and zip files that are not as torch writes them in
    a way that matters (encrypted, ambiguous, damaged). Compressed ones are unpacked first. Objects
    whose names begin with one of ``without_effect`` become ``WithoutEffect``; theirs is not called.
    """
    if not is_zip(path):
        return _load(path, path, mmap=False)
    with _mappable(path) as stored:
        needed = _code_needed(stored) if without_effect else []
        stand_ins: list[Any] = [
            (WithoutEffect, name) for name in needed if name.startswith(without_effect)
        ]
        with torch.serialization.safe_globals(stand_ins):
            return _load(stored, path, mmap=True)


def is_zip(path: Path) -> bool:
    """Whether torch would take it for one of its newer files."""
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@contextlib.contextmanager
def _mappable(path: Path) -> Iterator[Path]:
    """The file, or one of the same content without compression; its bytes are checked."""
    try:
        _check_ends(path)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(path, entries)
            if all(entry.compress_type == zipfile.ZIP_STORED for entry in entries):
                _check_sums(path, archive)
                unpacked = None
            else:
                unpacked = _unpacked(path, archive)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged zip trips its reader in many ways
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read by torch.load: as the zip file "
            f"that it begins like it is damaged ({type(error).__name__}: {error})."
        ) from error
    try:
        yield path if unpacked is None else unpacked
    finally:
        if unpacked is not None:
            unpacked.unlink()  # what is mapped stays until it is let go


def _check_ends(path: Path) -> None:
    """Two readers agree on what is in a zip file where it begins and ends with the archive."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(size - _END_SIZE, 0))
        end = file.read(_END_SIZE)
    if len(end) < _END_SIZE or end[:4] != _END or end[-2:] != b"\0\0":
        raise CheckpointError(
            f"{path} ({size} bytes) cannot be read by torch.load: it begins like a zip file and "
            f"does not end like one. It was cut off, or something was put behind it. {_ANEW}"
        )


def _check_entries(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    if not entries or min(entry.header_offset for entry in entries) != 0:
        raise CheckpointError(f"{path} has something before its archive. {_ANEW}")
    seen: set[str] = set()
    for entry in entries:
        if entry.flag_bits & _ENCRYPTED:
            raise CheckpointError(f"{path} is encrypted: {entry.filename!r}. Decrypt it first.")
        name = entry.filename.casefold()  # torch's reader takes a and A for the same
        if name in seen:
            raise CheckpointError(
                f"{path} holds {entry.filename!r} twice: which one counts? {_ANEW}"
            )
        seen.add(name)


def _check_sums(path: Path, archive: zipfile.ZipFile) -> None:
    """Compare every entry with its checksum, where the file has any."""
    entries = archive.infolist()
    if not any(entry.CRC for entry in entries):  # torch.serialization.set_crc32_options(False)
        return
    for entry in entries:
        with archive.open(entry) as file:
            while file.read(_CHUNK):
                pass


def _unpacked(path: Path, archive: zipfile.ZipFile) -> Path:
    """A temporary file that holds the entries uncompressed; each is checked on the way."""
    needed = sum(entry.file_size for entry in archive.infolist())
    folder = tempfile.gettempdir()
    if needed > (free := shutil.disk_usage(folder).free):
        raise CheckpointError(
            f"{path} is compressed, and takes {needed} bytes unpacked: {free} are free in {folder}."
            " Set TMPDIR to a folder with more room, or save it anew with torch.save."
        )
    handle, name = tempfile.mkstemp(suffix=path.suffix, prefix="paceline-")
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target,
        ):
            for entry in archive.infolist():
                _copy(path, archive, entry, target)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def _copy(
    path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: zipfile.ZipFile
) -> None:
    left = entry.file_size
    plain = zipfile.ZipInfo(entry.filename)
    plain.file_size = entry.file_size
    with archive.open(entry) as source, target.open(plain, "w") as into:
        while chunk := source.read(min(_CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise CheckpointError(
                    f"{path}: {entry.filename!r} unpacks to more than the {entry.file_size} bytes "
                    "it declares."
                )
            into.write(chunk)


def _load(file: Path, path: Path, *, mmap: bool) -> Any:
    """``file`` is what is read, ``path`` what the user named."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch.load raises whatever the damage makes it trip over
        if needed := _code_needed(file):
            raise CheckpointError(
                f"{path} needs {', '.join(needed)}, and loading those would execute code from the "
                "file. Where you trust it, save a plain state dict with the program that made it: "
                "torch.save(model.state_dict(), …)."
            ) from None
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read by torch.load without executing "
            f"code from it: {type(error).__name__}."
        ) from error


def _code_needed(path: Path) -> list[str]:
    """The names that a file wants called and torch does not allow."""
    try:
        if is_zip(path):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        return sorted(name for name in _globals_in(path) if not _HARMLESS.fullmatch(name))
    except Exception:  # a damaged file: nobody can tell
        return []


def _globals_in(path: Path) -> set[str]:
    """What the pickles at the beginning of a file name, found without loading any of them."""
    found: set[str] = set()
    texts: list[str] = []
    with open(path, "rb") as file, contextlib.suppress(ValueError):  # where the pickles end
        while True:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    found.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    found.add(".".join(texts[-2:]))
                elif isinstance(argument, str):
                    texts.append(argument)
    return found
