"""Following values through one forward pass, to see which layers can be split together.

The model runs once on tensors without data. Every linear layer whose input is whole is tried as
column-parallel; its output is followed operation by operation (split_rules.py) until a linear layer
takes it in split, which is then row-parallel, or until something needs it whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.errors import LayoutError
from paceline.nested import tensors
from paceline.parallel.tensor.split_rules import (
    NeedsWhole,
    Split,
    first_tensor,
    pointwise,
    rule_for,
)
from paceline.parallel.tensor.splittable import kind_of
from paceline.torch_internals import (
    FAKE_TENSOR_LOGGER,
    FakeTensorMode,
    TorchDispatchMode,
    changes_arguments,
    operator_name,
)


@dataclass
class Findings:
    """What one pass found out about the layers, by module name."""

    called: set[str] = field(default_factory=set)
    columns: dict[str, set[int]] = field(default_factory=dict)  # with the sizes that must divide
    shared: dict[str, int] = field(default_factory=dict)  # columns of heads that others share
    rows: set[str] = field(default_factory=set)
    losses: set[str] = field(default_factory=set)  # columns that end in a cross-entropy
    consumed: set[str] = field(default_factory=set)  # columns that a row takes in
    whole: dict[str, str] = field(default_factory=dict)  # columns that cannot be split, and why
    packings: dict[str, int] = field(default_factory=dict)  # columns to try again, packed
    looked_up: set[str] = field(default_factory=set)  # embeddings indexed by the model's inputs


class Flow:
    """One pass: ``packing`` says which columns to try packed, ``fixed`` which layers stay whole."""

    def __init__(self, model: nn.Module, packing: dict[str, int], fixed: set[str]) -> None:
        self.model, self.packing, self.fixed = model, packing, fixed
        self.found = Findings()
        self.paused = False
        # Found out beforehand: trying a module out takes real values.
        self._kinds = {name: kind_of(module) for name, module in model.named_modules()}
        self._splits: dict[int, tuple[Tensor, Split]] = {}
        self._inputs: dict[int, Tensor] = {}
        self._path: list[str] = []

    def run(self, sample: Callable[[nn.Module], Any]) -> Findings:
        """Run the model by ``sample(model)`` and give back what was found."""
        with self._hooks(), _Operators(self), _Functions(self), torch.no_grad():
            sample(self.model)
        return self.found

    def split_of(self, value: Any) -> Split | None:
        """The split of a tensor, if it has one."""
        known = self._splits.get(id(value)) if isinstance(value, Tensor) else None
        return known[1] if known is not None else None

    def set(self, value: Any, split: Split | None) -> None:
        """Note the split of a tensor, which is kept so that its id stays its own."""
        if not isinstance(value, Tensor):
            return
        if split is None:
            self._splits.pop(id(value), None)
        else:
            self._splits[id(value)] = (value, split)
            for name, unit in split.units:
                self.found.columns.setdefault(name, set()).add(unit)
            self.found.shared.update(split.shared)

    def needs_whole(self, splits: list[Split], what: str, pieces: int | None = None) -> None:
        """``what`` takes values that are split, and cannot."""
        if len({(split.dim, split.chunks) for split in splits}) > 1:
            # Split in different ways: the smaller may do whole, such as the one head of keys that
            # all queries share, and leave the larger as it is.
            smallest = min(map(_size, splits))
            splits = [split for split in splits if _size(split) == smallest]
        origins = {name for split in splits for name in split.origins}
        here = f" in {self._path[-1]}" if self._path and self._path[-1] else ""
        for name in origins:
            packed = pieces is not None and len(origins) == 1 and name not in self.packing
            if packed and pieces is not None and pieces > 1:
                self.found.packings[name] = pieces
            else:
                self.found.whole.setdefault(name, f"{what}{here} needs its output whole")

    def comes_from_input(self, value: Any) -> bool:
        """Whether an index was computed from the model's inputs."""
        return id(value) in self._inputs

    def mark_input(self, value: Any) -> None:
        """Note that a tensor was computed from the model's inputs."""
        for tensor in tensors(value):
            self._inputs[id(tensor)] = tensor

    # ---- modules ----

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(
                module.register_forward_hook(
                    self._leaving(name, module), with_kwargs=True, always_call=True
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append(name)
            if name == "":
                self.mark_input((args, kwargs))
            if self._kinds[name] is not None:
                self.paused = True

        return hook

    def _leaving(self, name: str, module: nn.Module) -> Callable[..., None]:
        kind = self._kinds[name]

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._path:
                self._path.pop()
            if kind is None:
                return
            self.paused = False
            self.found.called.add(name)
            x = (*args, *kwargs.values())[0] if args or kwargs else None
            if kind in ("attention", "experts"):
                splits = [s for t in tensors((args, kwargs)) if (s := self.split_of(t)) is not None]
                self.needs_whole(splits, name)
            elif kind == "embedding":
                if self.comes_from_input(x):
                    self.found.looked_up.add(name)
            else:
                self._linear(name, module, x, output)

        return hook

    def _linear(self, name: str, module: nn.Module, x: Any, output: Any) -> None:
        split = self.split_of(x)
        if split is not None and name in self.fixed:
            self.needs_whole([split], f"{name}, which is not split,")
        elif split is not None:
            if split.dim != x.ndim - 1 or split.chunks != 1 or name in self.found.columns:
                self.needs_whole([split], f"{name}, which takes another dimension of it,")
            else:
                self.found.rows.add(name)
                self.found.consumed |= split.origins
        elif name in self.found.rows:
            self.found.whole[name] = "its input is split in one call and whole in another"
        elif name not in self.fixed and isinstance(output, Tensor):
            chunks = self.packing.get(name, 1)
            split = Split(output.ndim - 1, chunks, frozenset({name}))
            self.set(output, split.with_unit(output.shape[-1] // chunks))


def _size(split: Split) -> int:
    return max(unit for _, unit in split.units)


class _Operators(TorchDispatchMode):
    """Carries splits through every operator."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        flow = self.flow
        if flow.paused:
            return out
        inputs = list(tensors((args, kwargs)))
        if any(flow.comes_from_input(t) for t in inputs):
            flow.mark_input([t for t in tensors(out) if not t.is_floating_point()])
        splits = [s for t in inputs if (s := flow.split_of(t)) is not None]
        if splits:
            self._carry(func, args, dict(kwargs), splits, out)
        elif changes_arguments(func) and isinstance(out, Tensor):
            flow.set(out, None)
        return out

    def _carry(
        self, func: Any, args: Any, kwargs: dict[str, Any], splits: list[Split], out: Any
    ) -> None:
        flow = self.flow
        rule = rule_for(func)
        name = operator_name(func)
        if not any(True for _ in tensors(out)):  # asks for a size or the like
            return
        try:
            if rule is None:
                raise NeedsWhole
            if args and isinstance(args[0], tuple | list):
                kwargs["_listed"] = [flow.split_of(t) for t in args[0]]
            result = rule(args, kwargs, [flow.split_of(value) for value in args], out)
        except NeedsWhole as refusal:
            flow.needs_whole(splits, name, refusal.pieces)
            for tensor in tensors(out):
                flow.set(tensor, None)
            return
        if isinstance(result, list):
            outs = [out] if isinstance(out, Tensor) else list(out)
            for tensor, split in zip(outs, result, strict=False):
                flow.set(tensor, split)
        else:
            flow.set(first_tensor(out), result)


class _Functions(TorchFunctionMode):
    """Functions that are followed as one: attention, dropout, the loss."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _WHOLE_FUNCTIONS.get(func)
        if rule is None or self.flow.paused:
            return func(*args, **kwargs)
        self.flow.paused = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.flow.paused = False
        rule(self.flow, args, kwargs, out)
        return out


def _attention(flow: Flow, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    named = {**dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)), **kwargs}
    tensors = [named[name] for name in ("query", "key", "value")]
    splits = [flow.split_of(t) for t in tensors]
    found = [s for s in splits if s is not None]
    mask = flow.split_of(named.get("attn_mask"))
    if mask is not None:
        flow.needs_whole([mask], "the mask of an attention")
    if not found:
        return
    query = splits[0]
    if query is not None and query.dim < out.ndim - 2:
        # One head of keys for all queries: split along its features, if at all.
        single = [
            split.sharing(1)
            for t, split in zip(tensors[1:], splits[1:], strict=True)
            if split is not None and split.dim != query.dim and t.shape[query.dim] == 1
        ]
        flow.found.shared.update(pair for split in single for pair in split.shared)
        found = [s for s in found if not any(s.origins == one.origins for one in single)]
    dims = {s.dim for s in found}
    if len(dims) > 1 or next(iter(dims)) >= out.ndim - 2 or any(s.chunks > 1 for s in found):
        flow.needs_whole(found, "scaled_dot_product_attention")
        return
    joined = found[0]
    for tensor, split in zip(tensors[1:], splits[1:], strict=True):
        if split is not None and split in found:
            heads = tensor.shape[split.dim]
            fewer = query is not None and heads < tensors[0].shape[query.dim]
            joined = joined.joined(split.sharing(heads) if fewer else split)
    flow.set(out, joined)


def _dropout(flow: Flow, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    x = args[0] if args else kwargs["input"]
    split = flow.split_of(x)
    if split is not None:
        flow.set(out, pointwise([x], {}, [split], out))


def _cross_entropy(flow: Flow, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    names = ("input", "target", "weight")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    logits = named["input"]
    split = flow.split_of(logits)
    if split is None:
        return
    classes = 0 if logits.ndim == 1 else 1
    numbers = not named["target"].is_floating_point()
    if split.dim != classes or split.chunks > 1:
        flow.needs_whole([split], "cross_entropy over other classes")
    elif named.get("weight") is not None:
        flow.needs_whole([split], "cross_entropy with class weights")
    elif not numbers:
        flow.needs_whole([split], "cross_entropy with class probabilities")
    else:
        flow.found.losses |= split.origins


_WHOLE_FUNCTIONS: dict[Any, Callable[..., None]] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    F.dropout: _dropout,
}


@contextlib.contextmanager
def without_data(model: nn.Module) -> Iterator[None]:
    """Run what is inside on tensors that have shapes but no values; meta tensors may take part."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A model that cannot run so is run with values: its failure is not worth a page of log.
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    level = log.level
    exchanged: list[tuple[dict[str, Any], str, Any]] = []
    with mode:
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in both:
                for key, value in held.items():
                    if value is not None and value.is_meta:
                        exchanged.append((held, key, value))
        stand_ins = {
            id(v): torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cpu")
            for _, _, v in exchanged
        }
    for held, key, value in exchanged:
        held[key] = stand_ins[id(value)]
    log.setLevel(logging.CRITICAL)
    try:
        with mode:
            yield
    finally:
        log.setLevel(level)
        for held, key, value in exchanged:
            held[key] = value


def trace(
    model: nn.Module, sample: Callable[[nn.Module], Any], packing: dict[str, int], fixed: set[str]
) -> Findings:
    """One run of the model, without values where it can do without."""
    flow = Flow(model, packing, fixed)
    try:
        with _as_it_was(model), without_data(model):
            return flow.run(sample)
    except Exception as error:
        # A model that looks at values cannot run without them.
        if any(p.is_meta for p in model.parameters()):
            raise LayoutError(
                f"no tensor-parallel plan was found: {type(model).__name__} on the meta device "
                f"does not run without values ({type(error).__name__}: {error}). Give the plan as "
                "a mapping of name patterns."
            ) from error
        with _as_it_was(model):
            return Flow(model, packing, fixed).run(sample)


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Leave random state and buffers as they were."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
