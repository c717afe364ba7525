"""What the ranks have computed for their samples, put together again in the order of the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.nested import map_leaves
from paceline.world import World, collectives


def gathered(values: Any, world: World) -> Any:
    """``values`` with every tensor in it that of all ranks, along dimension 0, in rank order."""
    return map_leaves(values, lambda leaf: _all(leaf, world), is_leaf=_is_list)


def samples_only(values: Any, rows: int, samples: int) -> Any:
    """``values`` without what belongs to no sample: of ``rows`` rows the first ``samples``."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _rows(leaf, rows, samples)
        if _is_list(leaf):
            if len(leaf) != rows:
                raise TrainingError(
                    f"gather_for_metrics: a list of {len(leaf)} items for a batch of {rows} "
                    "samples. Give one item a sample, or use accelerator.gather for what is not "
                    "by sample."
                )
            return leaf[:samples]
        return leaf

    return map_leaves(values, cut, is_leaf=_is_list)


def _rows(tensor: Tensor, rows: int, samples: int) -> Tensor:
    if tensor.ndim == 0:  # a loss: it stands for each of its samples
        return tensor.detach().expand(samples)
    found = len(tensor)
    # loss.repeat(batch_size), as many scripts have it, is too long for a short last batch.
    if found != rows and not (found > rows and bool((tensor == tensor[:1]).all())):
        raise TrainingError(
            f"gather_for_metrics: a tensor of shape {tuple(tensor.shape)} for a batch of {rows} "
            "samples: dimension 0 must be the samples. Shape it so, or use accelerator.gather for "
            "what is not by sample."
        )
    return tensor[:samples]


def _all(leaf: Any, world: World) -> Any:
    if isinstance(leaf, Tensor):
        own = leaf.detach().reshape(1) if leaf.ndim == 0 else leaf.detach()
        parts = collectives.all_to_all([own] * world.size)
        shapes = {tuple(part.shape[1:]) for part in parts if len(part)}
        if len(shapes) > 1:
            raise TrainingError(
                "gather: the ranks have tensors that differ beyond dimension 0: "
                f"{', '.join(str(tuple(part.shape)) for part in parts)}. Pad them to one length "
                "first."
            )
        kept = [part for part in parts if len(part)] or parts[:1]
        return torch.cat(kept)
    every = collectives.all_gather_object(leaf)
    return [item for part in every for item in part] if _is_list(leaf) else every


def _is_list(value: Any) -> bool:
    """Whether it is a list of plain values, one a sample, such as texts."""
    if not isinstance(value, list):
        return False
    return not any(isinstance(item, Tensor | list | tuple | dict) for item in value)
