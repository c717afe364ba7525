"""Weights of other programs as a checkpoint that a run can start from."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import with_key
from paceline.checkpoint.rank_state import Part, RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.weights.export_config import INFO_KEY
from paceline.checkpoint.weights.weight_files import LoadedWeights, read_source
from paceline.errors import CheckpointError

_SMALL = 1024 * 1024
"""An expanded tensor of at most this size is written as large as it looks."""
_MOST_TIMES, _MOST_SHARED = 16, 64 * 1024 * 1024


def import_weights(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    part: str = "",
    strip: str = "",
    key: str | None = None,
) -> Checkpoint:
    """Make a checkpoint of step 0 in ``target`` from the weights in ``source``.

    ``source``: a safetensors file, a Hugging Face folder, a state dict that torch saved, or a
    checkpoint of Paceline 0.1 (its weights). Nothing in it is executed; a file that needs code to
    be loaded is refused. ``target``, a path or a URL, must hold no checkpoint yet.

    ``strip`` takes a prefix off every name, such as ``module.``; ``part`` names the submodule of
    the model that the weights are for, and goes before every name. With a ``key`` (``env:NAME`` or
    ``file:/path``), the checkpoint is written with it.
    """
    folder = Folder(target, digest=with_key(key))
    if taken := folder.checkpoints() or folder.old_format():
        first = taken[0].name if isinstance(taken[0], Checkpoint) else taken[0]
        raise CheckpointError(
            f"{folder.where} holds {first} already, and an import never writes over what is there. "
            "Name a new folder."
        )
    found = read_source(source)
    state = RankState(tensors=_parts(found, os.fspath(source), strip, part))
    with _left_as_it_was(folder), folder.lock("paceline checkpoint import"):
        return save(folder, 0, state, info=_info(found, source), group=None)


def _parts(found: LoadedWeights, source: str, strip: str, part: str) -> dict[str, Part]:
    """What is to be saved, by its name in the checkpoint."""
    if not found.tensors:
        raise CheckpointError(f"{source} holds no tensors: there is nothing to import.")
    names = _renamed([*found.tensors], strip, part, source)
    parts = {
        f"model/{names[name]}": whole_part(_plain(name, tensor))
        for name, tensor in found.tensors.items()
    }
    _check_size([*found.tensors.values()], source)
    return parts


def _renamed(names: list[str], strip: str, part: str, source: str) -> dict[str, str]:
    if strip and (others := [name for name in names if not name.startswith(strip)]):
        raise CheckpointError(
            f"{source}: {len(others)} of {len(names)} names do not begin with {strip!r}, such as "
            f"{others[0]!r}. Give the prefix that all of them have, or none."
        )
    prefix = f"{part}." if part else ""
    if strip in names:
        without = f" without {strip!r}" if strip else ""
        raise CheckpointError(f"{source}: a tensor{without} has no name: weights go by names.")
    return {name: prefix + name.removeprefix(strip) for name in names}


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if its elements can be written one after the other."""
    kind = None
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = type(tensor).__name__
    elif tensor.is_meta:
        kind = "meta"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.is_nested:
        kind = "nested"
    elif tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    if kind is not None:
        raise CheckpointError(f"{name!r} is a {kind} tensor; only plain ones can be imported.")
    if tensor.nbytes > max(spanned := _spanned(tensor), _SMALL):
        raise CheckpointError(
            f"{name!r} of shape {list(tensor.shape)} would take {tensor.nbytes} bytes, and the "
            f"file holds {spanned} for it: an expanded tensor, whose elements share their memory. "
            "Save what it was expanded from or, where it shall be that large, its contiguous()."
        )
    return tensor.resolve_conj().resolve_neg()


def _spanned(tensor: Tensor) -> int:
    """The bytes from the first to the last element of ``tensor`` in memory."""
    if tensor.numel() == 0:
        return 0
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def _check_size(tensors: Sequence[Tensor], source: str) -> None:
    """Refuse a file whose tensors share their memory so much that the checkpoint would explode."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    held, wanted = sum(s.nbytes() for s in storages.values()), sum(one.nbytes for one in tensors)
    if wanted > _MOST_TIMES * held + _MOST_SHARED:
        raise CheckpointError(
            f"{source} holds {held} bytes for {len(tensors)} tensors that would take {wanted} "
            "bytes, since they share their memory. Save each tensor that is meant once."
        )


@contextmanager
def _left_as_it_was(folder: Folder) -> Iterator[None]:
    """Take away, where an import fails, the folders that it made."""
    root = folder.storage.root if isinstance(folder.storage, LocalStorage) else None
    made = [] if root is None else [p for p in (root, *root.parents) if not p.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in made:  # the innermost first; what is not empty stays
                path.rmdir()
        raise


def _info(found: LoadedWeights, source: str | os.PathLike[str]) -> dict[str, Any]:
    info: dict[str, Any] = {
        "reason": "import",
        "source": f"{found.kind}: {os.fspath(source)}",
        "world_size": 1,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if found.hf_config:
        info[INFO_KEY] = found.hf_config
    return info
