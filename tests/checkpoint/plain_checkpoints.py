"""Checkpoints made by hand, without ranks: for tests of everything that reads them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box, whole
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import BLOCK, BlockHasher, hashed
from paceline.checkpoint.manifest import Manifest, ObjectEntry, Stored, TensorEntry, name_of
from paceline.checkpoint.storage.storage import Storage
from paceline.checkpoint.tensor_bytes import memory_of

SMALL_BLOCK = 64
"""So small that a file of a few hundred bytes has many."""


def put_checkpoint(
    folder: Folder,
    step: int,
    tensors: Mapping[str, Tensor] | None = None,
    objects: Mapping[str, Any] | None = None,
    *,
    ranks: int = 2,
    block: int = SMALL_BLOCK,
    token: str = "0a1b2c3d",
    metrics: Mapping[str, float] | None = None,
) -> Checkpoint:
    """Save ``tensors``, cut along their first dimension into a piece for each rank, by one."""
    made = Manifest(step, {"metrics": dict(metrics or {})})
    pieces = {name: _cut(tensor, ranks) for name, tensor in (tensors or {}).items()}
    stored: dict[str, list[Stored]] = {name: [] for name in pieces}
    folder.storage.make_folder(name_of(step))
    for rank in range(ranks):
        chunks: list[bytes] = []
        file = f"rank-{rank:05d}-{token}.bin"
        for name, cut in pieces.items():
            for box, piece in cut[rank]:
                data = bytes(memory_of(piece.contiguous()))
                stored[name].append(Stored(box, file, _end(chunks), len(data)))
                chunks.append(data + bytes(-len(data) % 64))
        if rank == 0:
            for name, value in (objects or {}).items():
                data = saved(value)
                made.objects[name] = ObjectEntry(file, _end(chunks), len(data))
                chunks.append(data)
        made.files[file] = put_file(folder.storage, f"{name_of(step)}/{file}", chunks, block)
    for name, tensor in (tensors or {}).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        made.tensors[name] = TensorEntry(tuple(tensor.shape), dtype, tuple(stored[name]))
    put_manifest(folder, step, made)
    return folder.get(step)


def put_file(storage: Storage, path: str, chunks: Sequence[bytes], block: int = BLOCK) -> Any:
    """Write a file; its entry for the manifest."""
    hasher = BlockHasher(block)
    storage.create(path, hashed(map(memoryview, chunks), hasher))
    return hasher.digests()


def put_manifest(folder: Folder, step: int, manifest: Manifest) -> None:
    folder.storage.replace(f"{name_of(step)}/manifest.json", manifest.to_bytes())


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _end(chunks: Sequence[bytes]) -> int:
    return sum(map(len, chunks))


def _cut(tensor: Tensor, ranks: int) -> list[list[tuple[Box, Tensor]]]:
    if tensor.dim() == 0:
        return [[(whole(()), tensor)], *([] for _ in range(1, ranks))]
    result: list[list[tuple[Box, Tensor]]] = []
    start = 0
    for piece in tensor.tensor_split(ranks):
        offset = (start, *[0] * (tensor.dim() - 1))
        result.append([(Box(offset, tuple(piece.shape)), piece)] if piece.numel() else [])
        start += len(piece)
    return result
