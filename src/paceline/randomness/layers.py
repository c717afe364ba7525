"""Layers that draw inside a kernel of torch, taken apart so that their draws can be controlled.

Attention with dropout is computed as products and a softmax, with memory for all of its weights;
a recurrent network with dropout layer by layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.randomness.drawing import Drawing
from paceline.randomness.dropout import dropped


def attention(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``F.scaled_dot_product_attention``, written out where it has dropout."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    rate = float(named.get("dropout_p") or 0.0)
    if not 0 < rate < 1:
        return NotImplemented
    query, key, value = named["query"], named["key"], named["value"]
    if named.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    drawn = random.numbers(func, shape, computed=True, folded=True)
    if drawn is None:
        return NotImplemented
    if not torch.compiler.is_compiling():
        random.note(
            "attention",
            "randomness: attention with dropout is computed as products and a softmax, since "
            "fused kernels draw their own masks; randomness='fast' would use them",
        )
    scale = named.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    weights = _softmax(scores, named.get("attn_mask"), bool(named.get("is_causal")))
    return dropped(weights, drawn, rate) @ value


def _softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if causal:
        size = scores.shape[-2:]
        allowed = torch.ones(size, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # A query that may look at nothing gets nothing, as in torch, not NaN.
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def recurrent(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An LSTM, GRU or RNN with dropout between its layers: one layer after the other."""
    if kwargs or len(args) != 9:
        return NotImplemented
    if isinstance(args[1], Tensor) and isinstance(args[3], list | tuple):  # a packed sequence
        _, _, _, _, _, layers, rate, training, _ = args
        if training and rate and layers > 1:
            random.leave(func, (len(args[0]),))
        return NotImplemented
    x, hidden, weights, biases, layers, rate, training, both_ways, batch_first = args
    if not training or not 0 < rate < 1 or layers == 1:
        return NotImplemented
    states = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    directions = 2 if both_ways else 1
    each = len(weights) // layers
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        at = slice(layer * directions, (layer + 1) * directions)
        own = tuple(state[at].contiguous() for state in states)
        given = own[0] if isinstance(hidden, Tensor) else own
        part = weights[layer * each : (layer + 1) * each]
        x, *end = func(x, given, part, biases, 1, 0.0, training, both_ways, batch_first)
        ends.append(tuple(end))
        if layer < layers - 1:
            drawn = random.numbers(
                func,
                x.shape,
                computed=True,
                time_first=not batch_first,
            )
            if drawn is None:
                return NotImplemented
            x = dropped(x, drawn, rate)
    return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))
