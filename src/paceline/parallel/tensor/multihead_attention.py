"""``nn.MultiheadAttention`` with its heads spread over the ranks.

Its projections are not modules of their own, and its forward ends in one function, which runs here
on each rank's heads: queries, keys and values are packed in one weight (or lie in three), split by
heads; the output projection is row-parallel.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from paceline.parallel.tensor.dropout import drawing, own_heads
from paceline.parallel.tensor.linear import shared_input
from paceline.parallel.tensor.shards import as_whole, gathered, summed, wrap


def attention_parts(module: nn.MultiheadAttention) -> dict[str, tuple[int, int]]:
    """``{parameter: (dim, chunks)}`` that are split; the output's bias stays whole."""
    made = {
        "in_proj_weight": (0, 3),
        "in_proj_bias": (0, 3),
        "q_proj_weight": (0, 1),
        "k_proj_weight": (0, 1),
        "v_proj_weight": (0, 1),
        "bias_k": (2, 1),
        "bias_v": (2, 1),
    }
    held = {key: part for key, part in made.items() if module._parameters.get(key) is not None}
    return {**held, "out_proj.weight": (1, 1)}


def split_multi_head_attention(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """``F.multi_head_attention_forward``; ``NotImplemented`` where its weights are not split."""
    if not isinstance(out_proj_weight, DTensor) or static_k is not None or static_v is not None:
        return NotImplemented
    if is_causal and attn_mask is None:
        return NotImplemented  # refused by torch, in its own words
    batched = query.ndim == 3
    rows = {id(t): t if batched else t.unsqueeze(1) for t in (query, key, value)}
    inputs = [
        shared_input(rows[id(t)], mesh).to_local(grad_placements=[Partial()])
        for t in (query, key, value)
    ]
    if use_separate_proj_weight:
        weights = [_local(w) for w in (q_proj_weight, k_proj_weight, v_proj_weight)]
    else:
        weights = list(_local(in_proj_weight).chunk(3))
    biases = [None] * 3 if in_proj_bias is None else _local(in_proj_bias).chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    length, samples, width = q.shape
    mask = _Mask(mesh, num_heads, samples, q.dtype)
    mask.add(attn_mask)
    mask.pad_keys(key_padding_mask)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, _local(bias_k).expand(1, samples, -1)])
        v = torch.cat([v, _local(bias_v).expand(1, samples, -1)])
        mask.grow()
    own = num_heads // mesh.size()
    q, k, v = (t.unflatten(-1, (own, width // own)).permute(1, 2, 0, 3) for t in (q, k, v))
    if add_zero_attn:
        zeros = k.new_zeros(samples, own, 1, width // own)
        k, v = torch.cat([k, zeros], 2), torch.cat([v, zeros], 2)
        mask.grow()
    dropped = dropout_p if training else 0.0
    found = None
    shape = (samples, num_heads, q.shape[-2], k.shape[-2])
    with own_heads(mesh, shape, 1) if dropped else contextlib.nullcontext():
        if need_weights:
            scores = (q * (width // own) ** -0.5) @ k.transpose(-2, -1)
            scores = scores if mask.value is None else scores + mask.value
            found = drawing(F.dropout)(scores.softmax(-1), dropped)
            y = found @ v
        else:
            y = drawing(F.scaled_dot_product_attention)(q, k, v, mask.value, dropped)
    y = y.permute(2, 0, 1, 3).reshape(length, samples, width)
    total = summed(F.linear(y, out_proj_weight.to_local()), mesh)
    total = total if out_proj_bias is None else total + out_proj_bias
    if found is not None:
        found = _all_heads(found, mesh, num_heads, average_attn_weights)
        found = found if batched else found.squeeze(0)
    return total if batched else total.squeeze(1), found


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _all_heads(weights: Tensor, mesh: DeviceMesh, heads: int, average: bool) -> Tensor:
    """The attention weights, (samples, own heads, queries, keys), of all heads or their mean."""
    if average:
        return summed(weights.sum(1), mesh) / heads
    shape = torch.Size((weights.shape[0], heads, *weights.shape[2:]))
    return gathered(wrap(weights, mesh, Shard(1), shape))


class _Mask:
    """What is added to the scores of this rank's heads: -inf where a boolean mask is true."""

    def __init__(self, mesh: DeviceMesh, heads: int, samples: int, dtype: torch.dtype) -> None:
        self._mesh, self._heads, self._samples, self._dtype = mesh, heads, samples, dtype
        self.value: Tensor | None = None

    def add(self, mask: Tensor | None) -> None:
        """A mask of queries and keys, for all heads or for each of every sample."""
        if mask is None:
            return
        mask = self._as_numbers(mask)
        if mask.ndim == 3:
            mask = mask.unflatten(0, (self._samples, self._heads))
            own = self._heads // self._mesh.size()
            mask = mask.narrow(1, self._mesh.get_local_rank() * own, own)
        self.value = mask

    def pad_keys(self, mask: Tensor | None) -> None:
        """A mask of the keys of each sample."""
        if mask is None:
            return
        mask = self._as_numbers(mask if mask.ndim == 2 else mask.unsqueeze(0))[:, None, None]
        self.value = mask if self.value is None else self.value + mask

    def grow(self) -> None:
        """One more key that every query may look at."""
        self.value = None if self.value is None else F.pad(self.value, (0, 1))

    def _as_numbers(self, mask: Tensor) -> Tensor:
        mask = as_whole(mask, self._mesh).to_local(grad_placements=[Partial()])
        if mask.dtype is torch.bool:
            return torch.zeros_like(mask, dtype=self._dtype).masked_fill(mask, -torch.inf)
        return mask.to(self._dtype)
