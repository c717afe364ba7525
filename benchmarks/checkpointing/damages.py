"""Damages that files suffer: by disks, by copying, by hands. Each changes at least one byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

PAGE = 4096


@dataclass(frozen=True)
class Site:
    """A checkpoint to damage. ``previous`` is the one before it, of the same shape.

    ``manifest`` is the name of the file that says what the others hold; ``None`` where there is
    none. ``stale`` are manifests that once lay in this folder or the one before it.
    """

    folder: Path
    previous: Path
    manifest: str | None
    stale: tuple[Path, ...] = ()

    @property
    def data(self) -> list[Path]:
        """The files with the bytes of tensors."""
        return _files(self.folder, self.manifest)

    @property
    def files(self) -> list[Path]:
        """All files."""
        return _files(self.folder, None)


@dataclass(frozen=True)
class Done:
    """A damage: to which files (of a stale manifest: those it speaks of, too), and what it was."""

    files: list[str]
    what: str = ""


Damage = Callable[[Site, Random], Done | None]
"""Does it and says what it did; ``None`` where such a damage cannot be done to such a site."""


def flip(site: Site, draw: Random) -> Done | None:
    return _flip(draw.choice(site.data), draw)


def truncate(site: Site, draw: Random) -> Done | None:
    return _truncate(draw.choice(site.data), draw)


def remove(site: Site, draw: Random) -> Done | None:
    return _remove(draw.choice(site.data))


def swap(site: Site, draw: Random) -> Done | None:
    """Two files of the checkpoint change names."""
    if len(site.data) < 2:
        return None
    one, other = draw.sample(site.data, 2)
    kept = one.with_name("swapped")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)
    return Done([one.name, other.name])


def older_file(site: Site, draw: Random) -> Done | None:
    """A file is that of the checkpoint before, as after a copy that was stopped half-way."""
    number = draw.randrange(len(site.data))
    shutil.copyfile(_files(site.previous, site.manifest)[number], site.data[number])
    return Done([site.data[number].name])


def older_pages(site: Site, draw: Random) -> Done | None:
    """Some pages are those of the checkpoint before: the disk lost the last write to them."""
    number = draw.randrange(len(site.data))
    new = bytearray(site.data[number].read_bytes())
    old = _files(site.previous, site.manifest)[number].read_bytes()
    start = end = 0
    while new[start:end] == old[start:end]:  # where nothing has changed, nothing would be lost
        start = draw.randrange(0, min(len(new), len(old)), PAGE)
        end = min(start + PAGE * draw.randint(1, 16), len(new), len(old))
    new[start:end] = old[start:end]
    site.data[number].write_bytes(new)
    return Done([site.data[number].name], f"from {start} to {end}")


def zero_tail(site: Site, draw: Random) -> Done | None:
    """A file has its size and ends in zeros: its last blocks never reached the disk."""
    path = draw.choice(site.data)
    content = bytearray(path.read_bytes())
    last = len(content.rstrip(b"\0"))  # zeroing only zeros would damage nothing
    start = draw.randrange(last)
    content[start:] = bytes(len(content) - start)
    path.write_bytes(content)
    return Done([path.name], f"from {start}")


def grow(site: Site, draw: Random) -> Done | None:
    """A file has more bytes than it was saved with."""
    path = draw.choice(site.data)
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, PAGE)))
    return Done([path.name])


def exchange_pages(site: Site, draw: Random) -> Done | None:
    """Two pages of a file change places."""
    path = draw.choice(site.data)
    content = bytearray(path.read_bytes())
    first = second = bytearray()
    while first == second:
        one, other = (draw.randrange(len(content) // PAGE) * PAGE for _ in range(2))
        first, second = content[one : one + PAGE], content[other : other + PAGE]
    content[one : one + PAGE], content[other : other + PAGE] = second, first
    path.write_bytes(content)
    return Done([path.name], f"at {one} and {other}")


def stale_manifest(site: Site, draw: Random) -> Done | None:
    """The manifest is that of an earlier save."""
    if site.manifest is None:
        return None
    older = draw.choice(site.stale)
    shutil.copyfile(older, site.folder / site.manifest)
    return Done([site.manifest, "rank-"], f"of {older.name}")


def flip_manifest(site: Site, draw: Random) -> Done | None:
    return _flip(site.folder / site.manifest, draw) if site.manifest else None


def truncate_manifest(site: Site, draw: Random) -> Done | None:
    return _truncate(site.folder / site.manifest, draw) if site.manifest else None


def empty_manifest(site: Site, draw: Random) -> Done | None:
    if site.manifest is None:
        return None
    (site.folder / site.manifest).write_bytes(b"")
    return Done([site.manifest])


def remove_manifest(site: Site, draw: Random) -> Done | None:
    return _remove(site.folder / site.manifest) if site.manifest else None


KINDS: dict[str, Damage] = {
    "flipped bits of a byte": flip,
    "truncated file": truncate,
    "missing file": remove,
    "swapped files": swap,
    "file of the save before": older_file,
    "pages of the save before": older_pages,
    "zero-filled tail": zero_tail,
    "file grown": grow,
    "pages exchanged": exchange_pages,
    "stale manifest": stale_manifest,
    "manifest: flipped bits": flip_manifest,
    "manifest: truncated": truncate_manifest,
    "manifest: emptied": empty_manifest,
    "manifest: missing": remove_manifest,
}


def _files(folder: Path, without: str | None) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != without)


def _flip(path: Path, draw: Random) -> Done:
    at = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ draw.randint(1, 255)]))
    return Done([path.name], f"at {at}")


def _truncate(path: Path, draw: Random) -> Done:
    size = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return Done([path.name], f"to {size} bytes")


def _remove(path: Path) -> Done:
    path.unlink()
    return Done([path.name])
