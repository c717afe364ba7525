"""What a run keeps in the shared memory of a node, seen as files. Imports no torch.

A run has a folder there. A segment is three files in it: ``.bin`` holds the bytes of one rank,
``.index`` says which tensors they are, ``.json`` makes the segment count. The last one is written
last and taken away first, so that a process killed at any instant leaves a segment that is whole
or one that does not count. The two texts are manifests of the usual kind.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.memory.private_files import check_private, is_private, read_private
from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.storage.os_errors import explained
from paceline.checkpoint.storage.storage import TEMPORARY
from paceline.errors import CheckpointError

ROOT = "/dev/shm"
OWN, COPY = "own", "copy"
"""A segment that a rank wrote for itself, and one it keeps for a rank on another node."""

_NAME = re.compile(r"rank-(\d{5,})\.(own|copy)\.([01])")
_RUN = "run.json"


@dataclass(frozen=True)
class SlotName:
    """Whose share a segment holds: of ``rank``, its own or a copy, in the slot 0 or 1."""

    rank: int
    kind: str
    slot: int

    def __str__(self) -> str:
        return f"rank-{self.rank:05d}.{self.kind}.{self.slot}"

    @staticmethod
    def parse(text: str) -> SlotName | None:
        """The name that ``text`` is; ``None`` where it is none."""
        match = _NAME.fullmatch(text)
        return SlotName(int(match[1]), match[2], int(match[3])) if match else None


def file_name(rank: int) -> str:
    """How manifests call the bytes of a rank."""
    return f"rank-{rank:05d}.bin"


def folder_of(run: str | os.PathLike[str], root: str | os.PathLike[str] = ROOT) -> Path:
    """The folder in shared memory of the run whose own folder (or URL) is ``run``."""
    key = xxhash.xxh3_64_hexdigest(_absolute(run).encode())
    return Path(root) / f"{_prefix()}{key}"


def make_folder(run: str | os.PathLike[str], root: str | os.PathLike[str] = ROOT) -> Path:
    """The same, made where it is not there yet. Nobody but this user may look into it."""
    folder = folder_of(run, root)
    with explained("make the folder", str(folder)), suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)  # anybody may make folders in shared memory, under this name too
    LocalStorage(folder).replace(_RUN, json.dumps({"run": _absolute(run)}).encode())
    return folder


@dataclass(frozen=True)
class Header:
    """What a segment that counts says of itself, without its bytes."""

    name: SlotName
    snapshot: str
    """The same for all segments of one snapshot, and for no others."""
    ranks: int
    identity: str
    index: str
    """The hash of its ``.index`` file."""
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step it was taken after."""
        return self.manifest.step


def make_header(
    manifest: Manifest,
    *,
    snapshot: str,
    ranks: int,
    identity: str,
    index: bytes,
    digest: Digest = XXH3,
) -> bytes:
    """The text of a ``.json`` file: the rank's file and objects, and what they are part of."""
    hashed = digest.of(index)
    facts = {"snapshot": snapshot, "ranks": ranks, "identity": identity, "index": hashed}
    info = {"of": facts, "info": manifest.info}
    return Manifest(manifest.step, info, manifest.files, {}, manifest.objects).to_bytes(digest)


def read_header(folder: Path, name: SlotName, digest: Digest = XXH3) -> Header:
    """The header of a segment that counts; raises where it is damaged or its bytes are short."""
    path = folder / f"{name}.json"
    with explained("read", str(path)):
        header = Manifest.from_bytes(read_private(path), str(path), digest)
        size = (folder / f"{name}.bin").lstat().st_size
    manifest = Manifest(header.step, {}, header.files, {}, header.objects, header.digest)
    try:
        facts, manifest.info = header.info["of"], header.info["info"]
        found = Header(
            name, facts["snapshot"], facts["ranks"], facts["identity"], facts["index"], manifest
        )
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} is no header of a segment.") from None
    if list(header.files) != [file_name(name.rank)] or name.rank >= found.ranks:
        raise CheckpointError(
            f"{path} is damaged: expected that of {file_name(name.rank)}, found that of "
            f"{', '.join(header.files) or 'nothing'}."
        )
    if size < manifest.size:
        raise CheckpointError(
            f"{folder / str(name)}.bin is damaged: expected {manifest.size} bytes, found {size}."
        )
    return found


def read_index(folder: Path, header: Header, digest: Digest = XXH3) -> Manifest:
    """The tensors in a segment; raises where the index is damaged."""
    path = folder / f"{header.name}.index"
    data = read_private(path)
    if (found := digest.named(header.manifest.digest).of(data)) != header.index:
        raise CheckpointError(f"{path} is damaged: expected hash {header.index}, found {found}.")
    return Manifest.from_bytes(data, str(path))


def names_in(folder: Path) -> list[SlotName]:
    """The segments in a folder, whether they count or not."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    parsed = {SlotName.parse(name.rpartition(".")[0]) for name in names}
    return sorted((name for name in parsed if name is not None), key=str)


def headers_in(
    folder: Path, identity: str, digest: Digest = XXH3
) -> tuple[list[Header], list[str]]:
    """The segments that count, and a sentence on each one that cannot be used."""
    headers: list[Header] = []
    problems: list[str] = []
    try:
        check_private(folder)
    except CheckpointError as error:
        return [], [str(error)]
    for name in names_in(folder):
        if not (folder / f"{name}.json").exists():
            continue
        try:
            header = read_header(folder, name, digest)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if header.identity == identity:
            headers.append(header)
        else:
            problems.append(f"{folder / str(name)} is of another run that used this folder.")
    return headers, problems


def step_in(folder: Path, name: SlotName, identity: str, digest: Digest = XXH3) -> int | None:
    """The step whose snapshot a segment is part of; ``None`` where it is of no use to this run."""
    with suppress(CheckpointError):
        header = read_header(folder, name, digest)
        return header.step if header.identity == identity else None
    return None


def remove_files(folder: Path, name: SlotName) -> None:
    """Remove a segment: first what makes it count."""
    for ending in ("json", "index", "bin"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)


def fetched_path(folder: Path, token: str, file: str) -> Path:
    """A file for what another node sends during a restore; it is unlinked as soon as it is open."""
    return folder.with_name(f"{folder.name}.fetched-{token}-{file}")


def remove_fetched(folder: Path) -> None:
    """Remove what a restore that was killed left behind."""
    for path in folder.parent.glob(f"{folder.name}.fetched-*"):
        with suppress(PermissionError):  # another user's, who chose such a name
            path.unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Remove texts that were not finished when their process was killed."""
    for name in os.listdir(folder):
        if TEMPORARY.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class RunInMemory:
    """What shared memory on this node holds of a run."""

    run: str
    folder: str
    steps: tuple[int, ...]
    bytes: int


def segments(root: str | os.PathLike[str] = ROOT, digest: Digest = XXH3) -> list[RunInMemory]:
    """The runs of this user that hold memory on this node."""
    found = sorted(Path(root).glob(f"{_prefix()}*"))
    return [_describe(folder, digest) for folder in found if is_private(folder)]


def free_run(run: str | os.PathLike[str], root: str | os.PathLike[str] = ROOT) -> int:
    """Give back what a run holds on this node; how many bytes that was.

    Only for a run that is over: one that is under way loses its snapshots.
    """
    folder = folder_of(run, root)
    if not check_private(folder):
        return 0
    held = _describe(folder, XXH3).bytes
    remove_fetched(folder)
    for name in names_in(folder):
        remove_files(folder, name)
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
    return held


def remove_folder(folder: Path) -> None:
    """Remove a run's folder if no segment is left in it; else who removes the last one will."""
    with suppress(FileNotFoundError):
        if names_in(folder):
            return
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another rank of this node is doing the same
            folder.rmdir()


def _describe(folder: Path, digest: Digest) -> RunInMemory:
    run, steps, held = folder.name, set[int](), 0
    with suppress(CheckpointError, ValueError, KeyError, TypeError):
        run = json.loads(read_private(folder / _RUN))["run"]
    for name in names_in(folder):
        with suppress(CheckpointError):
            steps.add(read_header(folder, name, digest).step)
    with suppress(FileNotFoundError):
        held = sum(path.lstat().st_blocks * 512 for path in folder.iterdir())
    return RunInMemory(run, str(folder), tuple(sorted(steps)), held)


def _absolute(run: str | os.PathLike[str]) -> str:
    text = os.fspath(run)
    return text if "://" in text else os.path.abspath(text)


def _prefix() -> str:
    return f"paceline-{os.getuid()}-"
