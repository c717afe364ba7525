"""How each of torch's random functions draws, given numbers that belong to samples.

A handler is called with the arguments of the function. It gives the result, or ``NotImplemented``
where the function is to be called as it is: because it draws nothing, or because what it draws is
left to the rank's own stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.randomness.counter import Numbers
from paceline.randomness.drawing import Drawing
from paceline.randomness.dropout import (
    alpha_dropout,
    dropout,
    feature_dropout,
    is_shared,
    rrelu,
)
from paceline.randomness.layers import attention, recurrent
from paceline.torch_internals import without_override_check

Handler = Callable[[Drawing, Any, Any, dict[str, Any]], Any]
Take = Callable[[Numbers], Tensor]


def is_own_generator(kwargs: dict[str, Any]) -> bool:
    """Whether the caller brings a generator: then the numbers are the caller's business."""
    return kwargs.get("generator") is not None


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


# ---------------------------------------------------------------------- new tensors


def _factory(take: Callable[[torch.dtype], Take]) -> Handler:
    """A function of a size, such as ``torch.rand(8, 1, 1)``."""

    def handle(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None or kwargs.get("layout", torch.strided) != torch.strided:
            return NotImplemented
        size = kwargs.get("size", args)
        if len(size) == 1 and isinstance(size[0], Sequence):
            size = size[0]
        return _new(random, func, tuple(size), kwargs, take)

    return handle


def _new(
    random: Drawing,
    func: Any,
    size: tuple[int, ...],
    kwargs: dict[str, Any],
    take: Callable[[torch.dtype], Take],
    default: torch.dtype | None = None,
) -> Any:
    dtype = kwargs.get("dtype") or default or torch.get_default_dtype()
    if dtype.is_complex:
        return NotImplemented
    drawn = random.numbers(func, size, computed=False)
    if drawn is None:
        return NotImplemented
    device = kwargs.get("device") or torch.get_default_device()
    made = drawn.of(take(dtype)).to(device)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _like(take: Callable[[torch.dtype], Take]) -> Handler:
    """A function of a tensor, such as ``torch.randn_like(x)``."""

    def handle(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["input"]
        dtype = kwargs.get("dtype") or given.dtype
        if dtype.is_complex:
            return NotImplemented
        drawn = random.numbers(func, given.shape, computed=True, shared=is_shared(given))
        if drawn is None:
            return NotImplemented
        made = drawn.of(take(dtype)).to(kwargs.get("device") or given.device)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    return handle


def _uniform(dtype: torch.dtype) -> Take:
    return lambda numbers: numbers.uniform(dtype)


def _normal(dtype: torch.dtype) -> Take:
    return lambda numbers: numbers.normal(dtype)


def _whole_numbers(low: int, high: int) -> Callable[[torch.dtype], Take]:
    def take(dtype: torch.dtype) -> Take:
        span = high - low
        return lambda n: ((n.uniform(torch.float64) * span).floor().long() + low).to(dtype)

    return take


def _randint(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [*args]
    size = tuple(kwargs["size"] if "size" in kwargs else given.pop())
    high = kwargs["high"] if "high" in kwargs else given.pop()
    low = kwargs.get("low", given[0] if given else 0)
    if kwargs.get("out") is not None:
        return NotImplemented
    return _new(random, func, size, kwargs, _whole_numbers(low, high), torch.int64)


def _randint_like(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given, *bounds = args
    bounds += [kwargs[name] for name in ("low", "high") if name in kwargs]
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return _like(_whole_numbers(low, high))(random, func, (given,), kwargs)


def _torch_normal(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    named = {**dict(zip(("mean", "std", "size"), args, strict=False)), **kwargs}
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    if named.get("out") is not None:
        return NotImplemented
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        made = _new(random, func, tuple(named["size"]), kwargs, _normal)
    else:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        drawn = random.numbers(func, shape, computed=True)
        made = NotImplemented if drawn is None else drawn.of(_normal(tensors[0].dtype))
    return made if made is NotImplemented else made * std + mean


# ---------------------------------------------------------------------- by probabilities


def _bernoulli(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    named = {**dict(zip(("input", "p"), args, strict=False)), **kwargs}
    given, p = named["input"], named.get("p")
    if named.get("out") is not None:
        return NotImplemented
    drawn = random.numbers(func, given.shape, computed=True, shared=is_shared(given))
    if drawn is None:
        return NotImplemented
    limit = given if p is None else p
    return (drawn.of(_uniform(torch.float64)) < limit).to(given.dtype)


def _multinomial(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    names = ("input", "num_samples", "replacement")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    weights, count = named["input"], named["num_samples"]
    if named.get("out") is not None:
        return NotImplemented
    if named.get("replacement") and count > 1:
        drawn = random.numbers(func, (*weights.shape[:-1], count), computed=True)
        if drawn is None:
            return NotImplemented
        sums = weights.double().cumsum(-1)
        at = drawn.of(_uniform(torch.float64)) * sums[..., -1:]
        return torch.searchsorted(sums, at, right=True).clamp_(max=weights.shape[-1] - 1)
    drawn = random.numbers(func, weights.shape, computed=True)
    if drawn is None:
        return NotImplemented
    # A race: the first to arrive, where each arrives at its own rate.
    arrival = drawn.of(lambda n: n.exponential(torch.float64)).clamp_(min=1e-300)
    return (weights.double() / arrival).topk(count).indices


# ---------------------------------------------------------------------- in place


def _filling(names: Sequence[str], defaults: Sequence[Any], fill: Callable[..., Take]) -> Handler:
    """A method that fills a tensor, such as ``x.normal_(mean, std)``."""

    def handle(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target, *given = args
        if target.is_complex() or any(isinstance(value, torch.Generator) for value in given):
            return NotImplemented
        settings = dict(zip(names, defaults, strict=True))
        settings |= dict(zip(names, given, strict=False))
        settings |= {name: value for name, value in kwargs.items() if name in settings}
        drawn = random.numbers(func, target.shape, computed=False)
        if drawn is None:
            return NotImplemented
        with torch.no_grad():
            target.copy_(drawn.of(fill(target.dtype, *settings.values())))
        return target

    return handle


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fill_bernoulli(dtype: torch.dtype, p: float) -> Take:
    return lambda n: ~n.keep(p) if 0 < p < 1 else n.keep(0.5).fill_(p >= 1)


def _bernoulli_(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target = args[0]
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not isinstance(p, Tensor):
        return _FILL_BERNOULLI(random, func, args, kwargs)
    drawn = random.numbers(func, target.shape, computed=False)
    if drawn is None:
        return NotImplemented
    with torch.no_grad():
        target.copy_(drawn.of(_uniform(torch.float64)) < p)
    return target


_FILL_BERNOULLI = _filling(("p",), (0.5,), _fill_bernoulli)


def _fill_uniform(dtype: torch.dtype, low: float, high: float) -> Take:
    return lambda n: n.uniform(_wide(dtype)) * (high - low) + low


def _fill_normal(dtype: torch.dtype, mean: float, std: float) -> Take:
    return lambda n: n.normal(_wide(dtype)) * std + mean


def _fill_log_normal(dtype: torch.dtype, mean: float, std: float) -> Take:
    return lambda n: (n.normal(_wide(dtype)) * std + mean).exp()


def _fill_exponential(dtype: torch.dtype, rate: float) -> Take:
    tiny = torch.finfo(_wide(dtype)).tiny  # torch never gives 0, of which a logarithm is taken
    return lambda n: (n.exponential(_wide(dtype)) / rate).clamp_(min=tiny)


def _fill_cauchy(dtype: torch.dtype, median: float, sigma: float) -> Take:
    return lambda n: ((n.uniform(_wide(dtype)) - 0.5) * math.pi).tan() * sigma + median


def _fill_geometric(dtype: torch.dtype, p: float) -> Take:
    return lambda n: (n.exponential(_wide(dtype)) / -math.log1p(-p)).floor() + 1


# ---------------------------------------------------------------------- what cannot be controlled


def _refused(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """No element of it belongs to a sample, or torch computes it out of sight."""
    given = next((value for value in args if isinstance(value, Tensor)), None)
    random.leave(func, () if given is None else tuple(given.shape))
    return NotImplemented


HANDLERS: dict[Any, Handler] = {
    F.dropout: dropout,
    torch.dropout: dropout,
    torch.dropout_: dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), feature_dropout),
    **dict.fromkeys((torch.feature_dropout, torch.feature_dropout_), feature_dropout),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_), alpha_dropout),
    **dict.fromkeys(
        (F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
        alpha_dropout,
    ),
    **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), rrelu),
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), recurrent),
    torch.rand: _factory(_uniform),
    torch.randn: _factory(_normal),
    torch.randint: _randint,
    torch.normal: _torch_normal,
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint_like: _randint_like,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _filling(("from", "to"), (0.0, 1.0), _fill_uniform),
    Tensor.normal_: _filling(("mean", "std"), (0.0, 1.0), _fill_normal),
    Tensor.log_normal_: _filling(("mean", "std"), (1.0, 2.0), _fill_log_normal),
    Tensor.exponential_: _filling(("lambd",), (1.0,), _fill_exponential),
    Tensor.cauchy_: _filling(("median", "sigma"), (0.0, 1.0), _fill_cauchy),
    Tensor.geometric_: _filling(("p",), (0.5,), _fill_geometric),
    **dict.fromkeys((torch.randperm, torch.poisson, torch.binomial, Tensor.random_), _refused),
    **dict.fromkeys((F.fractional_max_pool2d, F.fractional_max_pool3d), _refused),
}
"""Functions that draw, by what is called."""

DRAWN_BY_ELEMENT = frozenset(
    function
    for function, handler in HANDLERS.items()
    if handler not in (attention, recurrent, _refused, _multinomial)
)
"""Those of which each element of the result belongs to one of the input: parts can be drawn."""

INLINED = {
    function: without_override_check(function)
    for function in (
        F.multi_head_attention_forward,
        F.gumbel_softmax,
        nn.init.normal_,
        nn.init.uniform_,
    )
}
"""Functions of torch that are written in Python and call others that draw."""
