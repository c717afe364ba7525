"""Fingerprints of samples: small enough to compare between ranks, and still show a difference.

A fingerprint names each leaf of a sample, what it is, and a few of its values. Objects that nothing
is known of leave only their type, so that what two processes hold alike never looks different.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import xxhash

_ELEMENTS = 16
"""Values kept of a tensor or array, spread over it."""
_SUMMED = 1 << 12
"""Elements of a large tensor whose sum is kept as well."""
_ITEMS = 32
"""Items looked into in one list: a long one of numbers is told by its ends and its length."""
_TEXT = 64
INDICES = "indices"
"""The path of what a sampler drew."""


class Leaf(NamedTuple):
    """One value of a sample: where it stands, what it is, and some numbers or a text of it."""

    path: str
    kind: str
    values: tuple[Any, ...]

    @property
    def is_rough(self) -> bool:
        """Whether machines may differ in its last digits: floating point, decoded images."""
        if self.kind.startswith("uint8"):
            return len(self.values) > _ELEMENTS  # an image; a label has one value
        return any(isinstance(value, float) for value in self.values)


Fingerprint = tuple[Leaf, ...]


def fingerprint(sample: Any, path: str = "") -> Fingerprint:
    """The fingerprint of ``sample``, a nest of containers, tensors, arrays, numbers and text."""
    return tuple(_leaves(sample, path))


def digest(value: Any) -> int:
    """62 bits of ``value``, which is written the same on every rank where it is the same."""
    return int(xxhash.xxh3_64_intdigest(repr(value).encode())) >> 2


def digest_of(leaves: Sequence[Leaf], *, without: frozenset[str], rough: bool) -> int:
    """The digest of some leaves but those at the paths ``without``, and the rough ones if so."""
    kept = [leaf[:2] if rough and leaf.is_rough else tuple(leaf) for leaf in but(leaves, without)]
    return digest(kept)


def but(leaves: Sequence[Leaf], without: frozenset[str]) -> Fingerprint:
    """The leaves that stand elsewhere than at the paths ``without``; ``""`` is the whole sample."""
    return tuple(leaf for leaf in leaves if not is_among(leaf.path, without))


def is_among(path: str, paths: Set[str]) -> bool:
    """Whether ``paths`` name this one; what a sampler drew is no part of any sample."""
    return path in paths or ("" in paths and path != INDICES)


def differing(one: Fingerprint, two: Fingerprint) -> list[tuple[Leaf, Leaf]]:
    """The leaves of two samples that are not the same, within what machines may differ by."""
    if [leaf.path for leaf in one] != [leaf.path for leaf in two]:
        mine, others = (Leaf("", "parts", tuple(leaf.path for leaf in p)) for p in (one, two))
        return [(mine, others)]
    return [(a, b) for a, b in zip(one, two, strict=True) if not _alike(a, b)]


def _alike(one: Leaf, two: Leaf) -> bool:
    if one.kind != two.kind or len(one.values) != len(two.values):
        return False
    if not one.is_rough:
        return one.values == two.values
    relative, absolute = (2e-2, 4.0) if one.kind.startswith("uint8") else (1e-3, 1e-6)
    return all(
        a == b
        or (math.isnan(a) and math.isnan(b))
        or math.isclose(a, b, rel_tol=relative, abs_tol=absolute)
        for a, b in zip(one.values, two.values, strict=True)
    )


def _leaves(value: Any, path: str) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield _tensor(value, path)
    elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        yield _array(value, path)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield _plain(value, path)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield from _sequence(value, path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None), f"{path}.{field.name}")
    elif callable(getattr(value, "tobytes", None)) and hasattr(value, "mode"):
        yield Leaf(path, f"image {value.mode} {value.size}", (digest(value.tobytes()),))
    else:
        yield Leaf(path, type(value).__qualname__, ())


def _sequence(value: Sequence[Any], path: str) -> Iterator[Leaf]:
    names = getattr(value, "_fields", None)
    yield Leaf(path, f"{type(value).__name__} of {len(value)}", ())
    shown = range(len(value))
    if names is None and len(value) > _ITEMS:
        shown = range(0, len(value), len(value) // _ITEMS)
    for index in shown:
        name = f"[{index}]" if names is None else f".{names[index]}"
        yield from _leaves(value[index], f"{path}{name}")


def _plain(value: Any, path: str) -> Leaf:
    kind = type(value).__name__
    if isinstance(value, str):
        # A file may lie in another folder on another machine: its name is what counts.
        value = value.replace("\\", "/").rpartition("/")[2] if "/" in value else value
        kept = value if len(value) <= _TEXT else f"{value[:_TEXT]} {digest(value)}"
        return Leaf(path, kind, (kept,))
    if isinstance(value, bytes):
        return Leaf(path, f"{len(value)} bytes", (xxhash.xxh3_64_intdigest(value) >> 2,))
    if isinstance(value, complex):
        return Leaf(path, kind, (value.real, value.imag))
    return Leaf(path, kind, () if value is None else (value,))


def _tensor(value: torch.Tensor, path: str) -> Leaf:
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    try:
        flat = value.detach().reshape(-1)
        return Leaf(path, kind, _some(flat, flat.numel()))
    except (RuntimeError, NotImplementedError):  # sparse, nested, meta: its shape has to do
        return Leaf(path, kind, ())


def _array(value: Any, path: str) -> Leaf:
    kind = f"{value.dtype} {tuple(value.shape)}"
    try:
        return _tensor(torch.as_tensor(value), path)._replace(kind=kind)
    except (TypeError, ValueError, RuntimeError):  # of objects or text
        flat = value.reshape(-1)
        items = flat[:: max(1, flat.size // _ELEMENTS)][:_ELEMENTS].tolist()
        known = [item for item in items if isinstance(item, str | int | float | bytes)]
        return Leaf(path, kind, tuple(known))


def _some(flat: torch.Tensor, count: int) -> tuple[Any, ...]:
    if count == 0:
        return ()
    if flat.is_complex():
        flat, count = torch.view_as_real(flat.resolve_conj()).reshape(-1), 2 * count
    picked = flat if count <= _ELEMENTS else flat[:: -(-count // _ELEMENTS)]
    values = picked.tolist()
    if count > _ELEMENTS:
        many = flat if count <= _SUMMED else flat[:: -(-count // _SUMMED)]
        many = many.double().abs() if many.is_floating_point() else many.to(torch.int64)
        values.append(many.sum().item())
    return tuple(values)
