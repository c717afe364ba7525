"""Attention on split activations: each rank computes its own heads.

It works for every model that calls ``F.scaled_dot_product_attention``, Hugging Face's among them;
which of their projections are split is in ``huggingface.py``. Attention that is written out as
products and a softmax runs by the rules of ``dispatch.py``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from paceline.parallel.tensor.dropout import drawing, own_heads
from paceline.parallel.tensor.shards import (
    as_split,
    as_whole,
    gathered,
    is_shared,
    placement,
    split_of,
    wrap,
)
from paceline.parallel.tensor.shared_heads import own_head


def split_attention(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` where some of the inputs are split.

    Split along their heads (or samples), each rank attends with its own; DTensor itself has no
    rule for the CPU's fused kernel. Otherwise the inputs are put together first.
    """
    attend: Any = F.scaled_dot_product_attention
    if dropout_p:
        attend = drawing(attend)
    dim = _common_dim(mesh, query, key, value)
    if dim is None:
        tensors = [gathered(query), gathered(key), gathered(value)]
        mask = None if attn_mask is None else gathered(attn_mask)
        return attend(*tensors, mask, dropout_p, is_causal, **others)
    queries = as_split(query, mesh, dim).to_local()
    local = [queries, *(_own_heads(t, mesh, dim, query.shape[dim]) for t in (key, value))]
    mask = None if attn_mask is None else _local_mask(attn_mask, mesh, dim)
    weights = (*query.shape[:-1], key.shape[-2])
    with own_heads(mesh, weights, dim) if dropout_p else contextlib.nullcontext():
        y = attend(*local, mask, dropout_p, is_causal, **others)
    shape = torch.Size((*query.shape[:-1], value.shape[-1]))
    return wrap(y, mesh, placement(y.ndim + dim), shape)


def _common_dim(mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor) -> int | None:
    """The batch-like dimension, counted from the end, that the ranks can share."""
    for tensor in (query, key, value):
        found = split_of(tensor) if isinstance(tensor, DTensor) else None
        if found is not None and found[1] == 1:
            dim = found[0] - tensor.ndim
            heads, kv_heads = query.shape[dim], key.shape[dim]
            fits = heads % mesh.size() == 0 and heads % kv_heads == 0
            same_kind = key.shape[dim] == value.shape[dim]
            return dim if dim < -2 and fits and same_kind else None
    return None


def _own_heads(tensor: Tensor, mesh: DeviceMesh, dim: int, queries: int) -> Tensor:
    """The heads of keys or values that this rank's queries need."""
    heads = tensor.shape[dim]
    if is_shared(tensor) and isinstance(tensor, DTensor) and heads == tensor.device_mesh.size(0):
        where = tensor.placements[0]
        if isinstance(where, Shard) and where.dim == tensor.ndim + dim:
            return own_head(tensor)
    if heads % mesh.size() == 0:
        return as_split(tensor, mesh, dim).to_local()
    own, sharing = queries // mesh.size(), queries // heads
    if own % sharing and sharing % own:  # a rank's queries end within those that share a head
        return as_split(gathered(tensor).repeat_interleave(sharing, dim), mesh, dim).to_local()
    whole = as_whole(tensor, mesh).to_local(grad_placements=[Partial()])
    first = mesh.get_local_rank() * own // sharing
    return whole.narrow(dim, first, max(1, own // sharing))


def _local_mask(mask: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    if mask.ndim >= -dim and mask.shape[dim] > 1:
        return as_split(mask, mesh, dim).to_local()
    # The same mask for every head: each rank's gradient of it is a term of a sum.
    return as_whole(mask, mesh).to_local(grad_placements=[Partial()])
