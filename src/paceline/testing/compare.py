"""Comparing what two runs computed, with a message that says where they part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def assert_same(a: Any, b: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raise ``AssertionError`` naming the first place where ``a`` and ``b`` differ.

    Tensors, numbers, modules (their state dicts), and mappings and sequences of them, nested as
    you like. Shapes, dtypes and keys must be equal. Values must satisfy
    ``|a - b| <= atol + rtol * |b|``; by default they must be bitwise-identical, NaN with NaN.
    """
    for where, difference in _differences(a, b, rtol, atol, ""):
        allowed = "bitwise-identical" if rtol == atol == 0 else f"rtol={rtol:g}, atol={atol:g}"
        raise AssertionError(f"{where or 'value'}: {difference} (allowed: {allowed})")


def _differences(a: Any, b: Any, rtol: float, atol: float, where: str) -> Iterator[tuple[str, str]]:
    a, b = (x.state_dict() if isinstance(x, torch.nn.Module) else x for x in (a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        difference = _tensor_difference(a, b, rtol, atol)
        if difference is not None:
            yield where, difference
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _mapping_differences(a, b, rtol, atol, where)
    elif _is_sequence(a) and _is_sequence(b):
        if len(a) != len(b):
            yield where, f"{len(a)} items against {len(b)}"
            return
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, rtol, atol, f"{where}[{index}]")
    elif _is_number(a) and _is_number(b):
        both_nan = a != a and b != b
        if a != b and not both_nan and not abs(a - b) <= atol + rtol * abs(b):
            yield where, f"{a!r} against {b!r}"
    elif type(a) is not type(b):
        yield where, f"a {type(a).__name__} against a {type(b).__name__}"
    elif a != b:
        yield where, f"{a!r} against {b!r}"


def _mapping_differences(
    a: Mapping[Any, Any], b: Mapping[Any, Any], rtol: float, atol: float, where: str
) -> Iterator[tuple[str, str]]:
    for key in [*a, *(key for key in b if key not in a)]:
        path = f"{where}.{key}" if where else str(key)
        if key not in b or key not in a:
            yield path, f"only in the {'first' if key in a else 'second'}"
        else:
            yield from _differences(a[key], b[key], rtol, atol, path)


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> str | None:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dtype.is_floating_point and a.dtype.itemsize == 1:  # float8 knows no comparison
        a, b = a.float(), b.float()
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if bool(close.all()):
        return None
    count = int((~close).sum())
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs()
    # A place where one is NaN is the worst there is.
    gap = torch.where(close, torch.zeros_like(gap), gap.nan_to_num(nan=torch.inf))
    worst = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)) if a.dim() else ()
    at = f" at {list(worst)}" if worst else ""
    return (
        f"{count} of {a.numel()} elements differ, most{at}: {a[worst].item()!r} against "
        f"{b[worst].item()!r}"
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)
