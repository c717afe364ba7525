"""Weights of other programs as a checkpoint that a run can start from."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.part import RankState, whole_part
from paceline.checkpoint.sharded.save import save
from paceline.checkpoint.weights.export_config import INFO_KEY
from paceline.checkpoint.weights.sources import Source, read_source
from paceline.errors import CheckpointError


def import_weights(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    part: str = "",
    strip: str = "",
) -> Checkpoint:
    """Make a checkpoint of step 0 in ``target`` from the weights in ``source``.

    ``source``: a safetensors file, a Hugging Face folder, a state dict that torch saved, or a
    checkpoint of Paceline 0.1 (its weights). Nothing in it is executed; a file that needs code to
    be loaded is refused. ``target``, a path or a URL, must hold no checkpoint yet.

    ``strip`` takes a prefix off every name, such as ``module.``; ``part`` names the submodule of
    the model that the weights are for, and goes before every name.
    """
    folder = Folder(target)
    if taken := folder.checkpoints() or folder.old_format():
        first = taken[0].name if isinstance(taken[0], Checkpoint) else taken[0]
        raise CheckpointError(
            f"{folder.where} holds {first} already, and an import never writes over what is there. "
            "Name a new folder."
        )
    found = read_source(source)
    names = _renamed([*found.tensors], strip, part, os.fspath(source))
    state = RankState(
        tensors={
            f"model/{names[name]}": whole_part(_plain(name, tensor))
            for name, tensor in found.tensors.items()
        }
    )
    with folder.lock("paceline checkpoint import"):
        return save(folder, 0, state, info=_info(found, source), group=None)


def _renamed(names: list[str], strip: str, part: str, source: str) -> dict[str, str]:
    if strip and (others := [name for name in names if not name.startswith(strip)]):
        raise CheckpointError(
            f"{source}: {len(others)} of {len(names)} names do not begin with {strip!r}, such as "
            f"{others[0]!r}. Give the prefix that all of them have, or none."
        )
    prefix = f"{part}." if part else ""
    return {name: prefix + name.removeprefix(strip) for name in names}


def _plain(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{name!r} is a {kind} tensor; only plain ones can be imported.")
    return tensor.resolve_conj().resolve_neg()


def _info(found: Source, source: str | os.PathLike[str]) -> dict[str, Any]:
    info: dict[str, Any] = {
        "reason": "import",
        "source": f"{found.kind}: {os.fspath(source)}",
        "world_size": 1,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if found.hf_config:
        info[INFO_KEY] = found.hf_config
    return info
