"""Which blocks of which file a rank needs to fill its parts, and who sends what. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.checkpoint.boxes import Box, overlap
from paceline.checkpoint.hashing import FileEntry
from paceline.checkpoint.manifest import Manifest, Stored, TensorEntry
from paceline.checkpoint.rank_state import Part

Blocks = dict[str, frozenset[int]]
"""Numbers of blocks by file."""
_MOST = 64 * 1024 * 1024


@dataclass(frozen=True)
class Transfer:
    """The bytes from ``start`` to ``end`` of a file, from one rank to another."""

    file: str
    source: int
    target: int
    start: int
    end: int


def merged(indices: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors of all ranks, each with all that is stored of it."""
    found: dict[str, TensorEntry] = {}
    for tensors in indices:
        for name, entry in tensors.items():
            before = found[name].stored if name in found else ()
            found[name] = TensorEntry(entry.shape, entry.dtype, (*before, *entry.stored))
    return found


def needed(parts: Mapping[str, Part], manifest: Manifest) -> Blocks:
    """The blocks that are read to fill ``parts``. What the manifest does not know needs none."""
    blocks: dict[str, set[int]] = {}
    for name, part in parts.items():
        if name not in manifest.tensors:
            continue
        for stored in manifest.tensors[name].stored:
            spans = [
                _span(stored, common, part.dtype.itemsize)
                for piece in part.pieces
                if len(piece.box.shape) == len(stored.box.shape)
                and (common := overlap(piece.box, stored.box)) is not None
            ]
            if spans:
                # What lies between is needed too: it may be read in one go.
                first, end = min(s for s, _ in spans), max(e for _, e in spans)
                block = manifest.files[stored.file].block
                blocks.setdefault(stored.file, set()).update(
                    range(first // block, -(-end // block))
                )
    return {file: frozenset(numbers) for file, numbers in blocks.items()}


def transfers(
    wanted: Sequence[Blocks],
    nodes: Sequence[Sequence[int]],
    holders: Mapping[str, Sequence[int]],
    files: Mapping[str, FileEntry],
) -> list[Transfer]:
    """How each node gets the blocks it lacks, in an order that all ranks follow.

    ``wanted`` is what each rank lacks, ``nodes`` the ranks on each node, ``holders`` the nodes
    that have a file. A block comes to a node once, and the work is spread over its ranks.
    """
    plan: list[Transfer] = []
    count = 0
    for ranks in nodes:
        lacking: dict[str, set[int]] = {}
        for rank in ranks:
            for file, numbers in wanted[rank].items():
                lacking.setdefault(file, set()).update(numbers)
        for file in sorted(lacking):
            senders = nodes[holders[file][count % len(holders[file])]]
            source, target = senders[count % len(senders)], ranks[count % len(ranks)]
            entry = files[file]
            plan += [
                Transfer(file, source, target, start, end)
                for start, end in _runs(lacking[file], entry)
            ]
            count += 1
    return plan


def _span(stored: Stored, box: Box, item_size: int) -> tuple[int, int]:
    """From the first byte of ``box`` in the file to behind its last one."""
    stride, first, last = 1, 0, 0
    inner = box.within(stored.box)
    for offset, length, size in zip(
        reversed(inner.offset), reversed(inner.shape), reversed(stored.box.shape), strict=True
    ):
        first += offset * stride
        last += (offset + length - 1) * stride
        stride *= size
    return stored.start + first * item_size, stored.start + (last + 1) * item_size


def _runs(numbers: set[int], entry: FileEntry) -> list[tuple[int, int]]:
    """Stretches of consecutive blocks, in bytes, none of them too long for a buffer."""
    most = max(_MOST // entry.block, 1)
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] and number - runs[-1][0] < most:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    return [(first * entry.block, min(end * entry.block, entry.size)) for first, end in runs]
