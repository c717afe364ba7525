"""Embeddings and cross-entropy over a vocabulary that is spread over ranks, evenly or not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from paceline.parallel.tensor.shards import gathered, rows_of, split_of, summed

_LOW = (torch.float16, torch.bfloat16)


def split_embedding(index: Tensor, weight: DTensor, padding_idx: int | None) -> Tensor:
    """The rows ``index`` of a ``weight`` whose rows are spread over ranks; whole and plain."""
    mesh = weight.device_mesh
    index = gathered(index)
    table = weight.to_local()
    start, rows = rows_of(weight.shape[0], mesh.size(), mesh.get_local_rank())
    _check_range(index, weight.shape[0])
    elsewhere = (index < start) | (index >= start + rows)
    if rows == 0:
        # No row to look up; the empty sum keeps this rank in the graph.
        found = table.new_zeros((*index.shape, weight.shape[1])) + table.sum()
    else:
        here = (index - start).masked_fill(elsewhere, 0)
        if padding_idx is not None:
            padding_idx = padding_idx % weight.shape[0] - start
            padding_idx = padding_idx if 0 <= padding_idx < rows else None
        found = F.embedding(here, table, padding_idx)
    return summed(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), mesh)


def _check_range(index: Tensor, rows: int) -> None:
    """An index that no rank holds would otherwise silently become a row of zeros."""
    if index.device.type == "cpu" and index.numel() and not index.is_meta:
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= rows:
            raise IndexError(
                f"index out of range in embedding: found {low}..{high}, the table has {rows} rows"
            )


def split_cross_entropy(
    logits: DTensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits split along their classes, without putting them together.

    ``target`` holds class numbers. The result is plain and equal on all ranks.
    """
    mesh = logits.device_mesh
    found = split_of(logits)
    assert found is not None
    classes = logits.shape[found[0]]
    start, held = rows_of(classes, mesh.size(), mesh.get_local_rank())
    local = logits.to_local().movedim(found[0], -1)
    dtype = local.dtype
    local = local.float() if dtype in _LOW else local
    target = gathered(target)
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    _check_classes(safe, classes)

    with torch.no_grad():
        # -inf where this rank holds no class at all.
        highest = local.amax(-1) if held else local.new_full(target.shape, -torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group())
    shifted = local - highest.unsqueeze(-1)
    elsewhere = (safe < start) | (safe >= start + held)
    if held:
        here = (safe - start).masked_fill(elsewhere, 0).unsqueeze(-1)
        own = shifted.gather(-1, here).squeeze(-1).masked_fill(elsewhere, 0.0)
    else:
        own = shifted.sum(-1)
    terms = [shifted.exp().sum(-1), own]
    if label_smoothing:
        terms.append(shifted.sum(-1))
    sums = summed(torch.stack(terms), mesh).unbind(0)
    log_total = sums[0].log()
    loss = log_total - sums[1]
    if label_smoothing:
        even = log_total - sums[2] / classes
        loss = (1 - label_smoothing) * loss + label_smoothing * even
    loss = loss.masked_fill(ignored, 0.0)
    if reduction == "mean":
        loss = loss.sum() / (~ignored).sum()
    elif reduction == "sum":
        loss = loss.sum()
    autocast = torch.is_autocast_enabled(local.device.type)
    return loss if autocast or dtype not in _LOW else loss.to(dtype)


def _check_classes(safe: Tensor, classes: int) -> None:
    if safe.device.type == "cpu" and safe.numel() and not safe.is_meta:
        low, high = int(safe.min()), int(safe.max())
        if low < 0 or high >= classes:
            raise IndexError(f"Target {low if low < 0 else high} is out of bounds.")
