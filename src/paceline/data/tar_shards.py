"""WebDataset's tar files: members that share a name up to its first dot make one sample."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from paceline.data.shard_files import ShardFile
from paceline.data.shard_formats import BLOCK, FileFormat, ShardIndex
from paceline.errors import DataError


class Member(NamedTuple):
    """One file in a tar file: its name, and where its bytes lie."""

    name: str
    header: int
    start: int
    size: int


class TarRecord(NamedTuple):
    """The members of one sample."""

    key: str
    members: tuple[Member, ...]


class TarFiles(FileFormat):
    """Samples as ``{"__key__": …, "jpg": …, "json": …}``, each part decoded by its ending.

    ``json``, ``txt``, ``cls`` (a whole number) and ``npy``/``npz`` (without pickled objects) are
    decoded; everything else, images and pickles among them, stays bytes.
    """

    name = "tar"

    def index_of(self, opened: ShardFile) -> ShardIndex:
        """Read the headers once, noting where every 128th sample begins."""
        count = 0
        offsets: list[int] = []
        for record in _records(opened, 0):
            if count % BLOCK == 0:
                offsets.append(record.members[0].header)
            count += 1
        return ShardIndex(count, (*offsets, opened.size))

    def blocks(self, opened: ShardFile, index: ShardIndex, first: int) -> Iterator[list[TarRecord]]:
        """Blocks of headers, from block ``first`` on; the members' bytes are not read yet."""
        for block in range(first, len(index.offsets) - 1):
            end = index.offsets[block + 1]
            records = []
            for record in _records(opened, index.offsets[block]):
                if record.members[0].header >= end:
                    break
                records.append(record)
            yield records

    def sample(self, opened: ShardFile, record: TarRecord, number: int) -> dict[str, Any]:
        """The members, read and decoded."""
        sample: dict[str, Any] = {"__key__": record.key}
        for member in record.members:
            ending = member.name[len(record.key) + 1 :].lower()
            data = opened.read(member.start, member.start + member.size)
            try:
                sample[ending] = _decoder(ending)(data)
            except (ValueError, RecursionError, EOFError, OSError) as error:
                raise DataError(
                    f"{opened.shown}, record {number}, {member.name}: "
                    f"{str(error) or type(error).__name__}. Mend or remove the sample."
                ) from error
        return sample


def _records(opened: ShardFile, start: int) -> Iterator[TarRecord]:
    """The samples whose headers lie from ``start`` on."""
    key: str | None = None
    members: list[Member] = []
    for member in _members(opened, start):
        its_key = _key(member.name)
        if its_key != key and members:
            assert key is not None
            yield TarRecord(key, tuple(members))
            members = []
        key = its_key
        members.append(member)
    if members:
        assert key is not None
        yield TarRecord(key, tuple(members))


def _members(opened: ShardFile, start: int) -> Iterator[Member]:
    opened.file.seek(start)
    where = start
    try:
        with tarfile.open(fileobj=opened.file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                where = archive.offset
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                if member.isdir() or member.name.rpartition("/")[2].startswith("__"):
                    continue
                if not member.isfile() or member.issparse():
                    raise DataError(
                        f"{opened.shown}, member {member.name!r}: it is no plain file, and "
                        "links, devices and sparse files are not read from a shard. Store a file."
                    )
                if "." not in member.name.rpartition("/")[2]:
                    raise DataError(
                        f"{opened.shown}, member {member.name!r}: its name has no ending, which "
                        "tells the parts of a sample apart. Name members like 000001.jpg."
                    )
                if member.offset_data + member.size > opened.size:
                    raise DataError(
                        f"{opened.shown}, member {member.name!r}: its {member.size} bytes go "
                        "beyond the end of the file, which is cut short."
                    )
                yield Member(member.name, member.offset, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise DataError(
            f"{opened.shown} is no tar file at byte {where}: {error}. It is damaged or cut short."
        ) from error


def _key(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _text(data: bytes) -> str:
    return data.decode("utf-8")


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": json.loads,
    "txt": _text,
    "text": _text,
    "cls": int,
    "npy": _array,
    "npz": _arrays,
}


def _decoder(ending: str) -> Callable[[bytes], Any]:
    return _DECODERS.get(ending.rpartition(".")[2], bytes)
