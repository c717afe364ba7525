"""The manifest: what a checkpoint holds, in which files, and how each file must hash; its name.

It is written last, so that a checkpoint without one is unfinished, and carries a hash of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import paceline.checkpoint.manifest_fields as fields
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.hashing import XXH3, Digest, FileEntry
from paceline.errors import CheckpointDamaged, CheckpointError
from paceline.untrusted import parse_json

MANIFEST = "manifest.json"
FORMAT = 2
"""1 was a single file a step, made by torch.save (Paceline 0.1)."""
_LONGEST_HEAD = 64 * 1024
_STEP_FOLDER = re.compile(r"step-(\d{9,})")
_OLD_FILE = re.compile(r"(step-\d+|best)\.pt")


@dataclass(frozen=True)
class Stored:
    """Where the bytes of a box are: contiguous, row by row, little-endian."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: ``dtype`` is torch's name for it, such as ``bfloat16``."""

    shape: tuple[int, ...]
    dtype: str
    stored: tuple[Stored, ...]


@dataclass(frozen=True)
class ObjectEntry:
    """Where the bytes of an object are, as ``torch.save`` wrote them."""

    file: str
    start: int
    length: int


@dataclass
class Manifest:
    """All there is to know of a checkpoint without opening its data files.

    ``info`` is for people and for retention: layout, world size, reason, metrics, versions, time.
    """

    step: int
    info: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    digest: str = XXH3.name
    """How its files are hashed, and it was itself when it was read: the name of a ``Digest``."""

    @property
    def size(self) -> int:
        """The size of all data files."""
        return sum(entry.size for entry in self.files.values())

    def to_bytes(self, digest: Digest = XXH3) -> bytes:
        """The text of the manifest file: a line with the format and a hash, then the rest.

        ``digest`` must be that of the hashes in ``files``.
        """
        body = json.dumps(
            {
                "step": self.step,
                "info": self.info,
                "files": {n: [f.size, f.block, list(f.hashes)] for n, f in self.files.items()},
                "tensors": {n: _tensor_to_json(t) for n, t in self.tensors.items()},
                "objects": {n: [o.file, o.start, o.length] for n, o in self.objects.items()},
            },
            separators=(",", ":"),
        ).encode()
        head = {"paceline_checkpoint": FORMAT, "bytes": len(body), **digest.head(body)}
        written = json.dumps(head).encode() + b"\n" + body + b"\n"
        if len(written) > fields.MOST_BYTES:
            raise CheckpointError(
                f"the manifest of step {self.step} would have {len(written)} bytes, and one of "
                f"more than {fields.MOST_BYTES} is refused on reading: "
                f"{len(self.tensors)} tensors in {len(self.files)} files of {self.size} bytes."
            )
        return written

    @classmethod
    def from_bytes(cls, data: bytes, where: str, digest: Digest = XXH3) -> Manifest:
        """The manifest in ``data``, which was read from ``where``; raises where it is damaged.

        ``digest`` is the reader's: where it has a key, nothing but what has that key is taken.
        """
        try:
            body, found = checked_body(data, where, digest)
            return cls._from_content(parse_json(body), found.name)
        except ValueError as error:
            raise CheckpointDamaged(f"{where} is damaged: {error}.") from None

    @classmethod
    def _from_content(cls, content: Any, digest: str) -> Manifest:
        parts = {
            part: fields.mapping(fields.member(content, part), part)
            for part in ("files", "tensors", "objects")
        }
        return cls(
            fields.count(fields.member(content, "step"), "step"),
            fields.info(fields.member(content, "info")),
            {name: file_from_json(name, value) for name, value in parts["files"].items()},
            {name: _tensor_from_json(name, value) for name, value in parts["tensors"].items()},
            {name: _object_from_json(name, value) for name, value in parts["objects"].items()},
            digest,
        )


def checked_body(data: bytes, where: str, digest: Digest) -> tuple[bytes, Digest]:
    """What follows the first line of a manifest, checked against it; and how it is hashed."""
    first, newline, rest = data.partition(b"\n")
    try:
        head = parse_json(first[:_LONGEST_HEAD])
        found, size = head["paceline_checkpoint"], head["bytes"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged(
            f"{where} is damaged: it does not begin like a manifest of Paceline's."
        ) from None
    if first != json.dumps(head).encode():
        raise CheckpointDamaged(f"{where} is damaged: its first line is not as it was written.")
    if found != FORMAT:
        raise CheckpointError(
            f"{where} is of format {found!r}, which this version of Paceline cannot read: it "
            f"knows format {FORMAT}."
        )
    kind = digest.to_read(head, where)
    body = rest[:-1]
    if not newline or rest[-1:] != b"\n" or len(body) != size:
        raise CheckpointDamaged(
            f"{where} is damaged: expected {size} bytes after its first line, found "
            f"{max(len(rest) - 1, 0)}."
        )
    kind.check(head, body, where)
    return body, kind


def _tensor_to_json(entry: TensorEntry) -> list[Any]:
    stored = [[s.box.offset, s.box.shape, s.file, s.start, s.length] for s in entry.stored]
    return [entry.shape, entry.dtype, stored]


def file_from_json(name: str, value: Any) -> FileEntry:
    """The entry of a file as the manifest holds it."""
    size, block, hashes = fields.file_entry(value, f"file {name!r}")
    return FileEntry(size, hashes, block)


def _tensor_from_json(name: str, value: Any) -> TensorEntry:
    where = f"tensor {name!r}"
    shape, dtype, stored = fields.array(value, where, 3)
    shape = fields.counts(shape, f"{where}, shape")
    boxes = fields.array(stored, f"{where}, boxes")
    return TensorEntry(
        shape, fields.text(dtype, f"{where}, dtype"), tuple(_stored(b, name, shape) for b in boxes)
    )


def _stored(value: Any, name: str, whole: tuple[int, ...]) -> Stored:
    where = f"tensor {name!r}, box"
    offset, shape, file, start, length = fields.array(value, where, 5)
    box = Box(fields.counts(offset, f"{where}, offset"), fields.counts(shape, f"{where}, shape"))
    fields.check_box(box.offset, box.shape, whole, name)
    return Stored(box, *_place(file, start, length, where))


def _object_from_json(name: str, value: Any) -> ObjectEntry:
    where = f"object {name!r}"
    file, start, length = fields.array(value, where, 3)
    return ObjectEntry(*_place(file, start, length, where))


def _place(file: Any, start: Any, length: Any, where: str) -> tuple[str, int, int]:
    return (
        fields.text(file, f"{where}, file"),
        fields.count(start, f"{where}, start"),
        fields.count(length, f"{where}, length"),
    )


def name_of(step: int) -> str:
    """The name of the folder that holds the checkpoint of ``step``."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint a folder of this name holds; ``None`` if it is not one."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def is_old(name: str) -> bool:
    """Whether it is a file of Paceline 0.1, which kept a checkpoint in one."""
    return _OLD_FILE.fullmatch(name) is not None
