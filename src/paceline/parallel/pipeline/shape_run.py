"""Running a whole model without data, to see what it computes where; and to measure its units."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import LayoutError
from paceline.nested import map_leaves, tensors
from paceline.parallel.pipeline.fake_tensors import (
    Birth,
    Fakes,
    Spec,
    born_in,
    is_fake,
    spec_of,
    template_of,
    zeros_like,
)
from paceline.parallel.pipeline.tracing import Mark, ModelRun, Name, StageEnd, where_in_model


def signature(part: Any) -> tuple[Any, ...]:
    """Names, shapes and dtypes of the tensors in ``part``, and the values that are no tensors."""
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), leaf.dtype, str(leaf.device)))
        elif isinstance(leaf, int | float | bool | str | bytes | type(None)):
            found.append((type(leaf).__name__, leaf))
        else:
            found.append(type(leaf).__name__)
        return leaf

    map_leaves(part, add)
    keys = tuple(map(str, part)) if isinstance(part, Mapping) else ()
    return (type(part).__name__, keys, *found)


class NeedsValues(Exception):
    """Code between units needs the values of what units computed."""


class Escape(NamedTuple):
    """A value that left a call of a unit by a side way (a hook, an attribute) and was used."""

    call: int
    place: int
    where: str


class ShapeRun(ModelRun):
    """The whole model on fake tensors: what each unit returns, and where each value is used.

    ``used`` maps names to the places of their uses: ``2k + 1`` for the k-th call of a unit, ``2k``
    for the code before it. ``calls_wanted`` ends the run after that many calls. ``real_after`` is
    for models that look at values once all modules have run, as a loss may: from that call on,
    values are zeros instead of fakes.
    """

    def __init__(
        self,
        fakes: Fakes,
        units: Mapping[str, nn.Module],
        twins: Mapping[str, nn.Module],
        *,
        calls_wanted: int | None = None,
        real_after: int | None = None,
        count_flops: bool = False,
    ) -> None:
        super().__init__()
        self._fakes, self._originals, self._twins = fakes, units, twins
        self._wanted, self._count_flops = calls_wanted, count_flops
        self._real_after = real_after
        self.units: list[str] = []
        self.templates: list[Any] = []
        self.flops: list[int] = []
        self.specs: dict[Name, Spec] = {}
        self.used: dict[Name, set[int]] = {}
        self.late: dict[int, list[int]] = {}
        self.escaped: list[Escape] = []
        self._lent: list[tuple[nn.Module, str, Any]] = []

    @property
    def place(self) -> int:
        """Where the run is, as in ``used``."""
        return 2 * self.calls

    def use(self, value: Any, where: str) -> Any:
        """Note that what is in ``value`` is used here."""
        self.note(value, self.place)
        return map_leaves(value, self._zeros) if self._in_tail else value

    @property
    def _in_tail(self) -> bool:
        return self._real_after is not None and self.calls >= self._real_after

    def _zeros(self, leaf: Any) -> Any:
        mark = self.mark_of(leaf) if is_fake(leaf) else None
        zeros = zeros_like(leaf)
        if mark is not None:
            zeros._paceline_mark = mark
        return zeros

    def note(self, value: Any, place: int) -> None:
        """Note that what is in ``value`` is used at ``place``."""
        for tensor in tensors(value):
            mark = self.mark_of(tensor)
            if mark is not None:
                self.used.setdefault(mark.name, set()).add(place)
            elif is_fake(tensor) and (call := born_in(tensor)) is not None:
                self.escaped.append(Escape(call, place, where_in_model()))

    def set_mark(self, tensor: Tensor, name: Name) -> None:
        """Name a value; keep what it looks like."""
        if not is_fake(tensor) and tensor._is_view() and not self._in_tail:
            raise LayoutError(
                "pipeline: the model writes what a module computed into a part of a tensor "
                f"({where_in_model()}), and the whole cannot be followed over a stage boundary. "
                "Build it with torch.cat or torch.stack instead, or train without pp."
            )
        tensor._paceline_mark = Mark(name, self, True)  # type: ignore[attr-defined]
        self.specs[name] = spec_of(tensor)

    def call_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the unit would return, as fake tensors."""
        place = self.place + 1
        if self._in_tail:
            raise NeedsValues(f"before the call of {name!r}")
        with self.paused():
            given = list(tensors((args, kwargs)))
            self.note((args, kwargs), place)
            for index, tensor in enumerate(given):
                if is_fake(tensor) and self.mark_of(tensor) is None:
                    self.set_mark(tensor, ("arg", self.calls, index))
                    self.late.setdefault(self.calls, []).append(index)
                    self.note(tensor, place)
            result = self._compute(name, args, kwargs)
            self._lend(name)
        self.units.append(name)
        self.templates.append(template_of(result, (args, kwargs)))
        self.after_call(result, given)
        if self.calls == self._wanted:
            raise StageEnd
        return result

    def _compute(self, name: str, args: Any, kwargs: Any) -> Any:
        counter = FlopCounterMode(display=False)
        counting: AbstractContextManager[Any] = counter if self._count_flops else nullcontext()
        try:
            with self._fakes.mode, counting, Birth(self.calls), torch.no_grad():
                result = self._twins[name](*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise LayoutError(
                f"pipeline: what {name!r} returns cannot be foreseen from the shapes of what it is "
                f"given, which is all that the other stages know of it. Without data it fails: "
                f"{type(error).__name__}: {error}. Make its output shapes independent of the "
                "values it computes, or train this model without pp."
            ) from error
        if self._count_flops:
            self.flops.append(counter.get_total_flops())
        return result

    def _lend(self, name: str) -> None:
        """Show what a unit keeps as attributes on the original too: other code may read it."""
        originals = dict(self._originals[name].named_modules())
        for path, twin in self._twins[name].named_modules():
            for key, value in twin.__dict__.items():
                if is_fake(value) and born_in(value) == self.calls and path in originals:
                    original = originals[path]
                    self._lent.append((original, key, original.__dict__.get(key)))
                    original.__dict__[key] = value

    def give_back(self) -> None:
        """Undo what the run left on the model's modules."""
        for original, key, value in reversed(self._lent):
            original.__dict__[key] = value
        self._lent = []


class MeasuringRun(ModelRun):
    """The whole model for real: how long each unit takes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.seconds: list[float] = []

    def use(self, value: Any, where: str) -> Any:
        """Nothing is followed here."""
        return value

    def set_mark(self, tensor: Tensor, name: Name) -> None:
        """Nothing is followed here."""

    def call_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the unit and take the time."""
        started = self._now()
        result = call(*args, **kwargs)
        self.seconds.append(self._now() - started)
        self.calls += 1
        return result

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
