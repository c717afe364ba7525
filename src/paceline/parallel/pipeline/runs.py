"""Three ways through a model's code: computing shapes, measuring units, running one stage."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import LayoutError
from paceline.parallel.pipeline.fakes import NEEDS_DATA, Fakes, Spec, is_fake, spec_of
from paceline.parallel.pipeline.glue import Mark, Name, Run
from paceline.parallel.pipeline.tree import change_leaves, leaves, tensors

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Over(BaseException):
    """Leaves a model's forward where the next stage begins; no ``except Exception`` stops it."""


class NeedsValues(Exception):
    """Code between units needs the values of what units computed."""


class ShapeRun(Run):
    """The whole model on fake tensors: what each unit returns, and where each value is used.

    ``used`` maps names to the places of their uses: ``2k + 1`` for the k-th call of a unit, ``2k``
    for the code before it. ``calls_wanted`` ends the run after that many calls. ``real_after`` is
    for models that look at values once all modules have run, as a loss may: from that call on,
    values are zeros instead of fakes.
    """

    def __init__(
        self,
        fakes: Fakes,
        twins: Mapping[str, nn.Module],
        *,
        calls_wanted: int | None = None,
        real_after: int | None = None,
    ) -> None:
        super().__init__()
        self._fakes, self._twins, self._wanted = fakes, twins, calls_wanted
        self._real_after = real_after
        self.units: list[str] = []
        self.templates: list[Any] = []
        self.flops: list[int] = []
        self.specs: dict[Name, Spec] = {}
        self.used: dict[Name, set[int]] = {}
        self.late: dict[int, list[int]] = {}

    @property
    def place(self) -> int:
        """Where the run is, as in ``used``."""
        return 2 * self.calls

    def use(self, value: Any, where: str) -> Any:
        """Note that what is in ``value`` is used here."""
        self.note(value, self.place)
        return change_leaves(value, self._zeros) if self._in_tail else value

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
            given = tensors((args, kwargs))
            for index, tensor in enumerate(given):
                if is_fake(tensor) and self.mark_of(tensor) is None:
                    self.set_mark(tensor, ("arg", self.calls, index))
                    self.late.setdefault(self.calls, []).append(index)
            self.note((args, kwargs), place)
            result = self._compute(name, args, kwargs)
        self.units.append(name)
        self.templates.append(_template(result, (args, kwargs)))
        self.after_call(result, given)
        if self.calls == self._wanted:
            raise Over
        return result

    def _compute(self, name: str, args: Any, kwargs: Any) -> Any:
        counter = FlopCounterMode(display=False)
        try:
            with self._fakes.mode, counter, torch.no_grad():
                result = self._twins[name](*args, **kwargs)
        except NEEDS_DATA as error:
            raise LayoutError(
                f"pipeline: what {name!r} returns cannot be foreseen: its code needs the values "
                f"of what it computes ({error}), and the other stages only know shapes. Put the "
                "part that needs them into one repeated block with a fixed output shape, or train "
                "this model without pp."
            ) from error
        self.flops.append(counter.get_total_flops())
        return result


class MeasuringRun(Run):
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


class StageRun(Run):
    """One stage: the calls ``first`` to ``last`` of units for real, those before as fakes.

    ``received`` are values of earlier stages by name; ``wanted`` those that later stages need. Ends
    with :class:`Over` at the call ``last``, unless that is past the end of the model.
    """

    def __init__(
        self,
        *,
        fakes: Fakes,
        units: Sequence[str],
        templates: Sequence[Any],
        late: Mapping[int, Sequence[int]],
        first: int,
        last: int,
        received: Mapping[Name, Tensor],
        wanted: Collection[Name],
        replacements: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self._fakes, self._units, self._templates, self._late = fakes, units, templates, late
        self._first, self._last = first, last
        self._received, self._wanted = received, frozenset(wanted)
        self._replacements = replacements
        self._started = first == 0
        self.found: dict[Name, Tensor] = {}
        for name, tensor in received.items():
            self._put(tensor, name, absent=False)

    def _put(self, tensor: Tensor, name: Name, *, absent: bool) -> None:
        tensor._paceline_mark = Mark(name, self, absent)  # type: ignore[attr-defined]
        if not absent and name in self._wanted:
            self.found[name] = tensor

    def set_mark(self, tensor: Tensor, name: Name) -> None:
        """Name a value; keep it if later stages want it."""
        absent = is_fake(tensor) if name[0] == "param" else not self._started
        self._put(tensor, name, absent=absent)

    def use(self, value: Any, where: str) -> Any:
        """``value`` with what other stages computed in place of the fakes."""
        if not self._started:
            return value
        return change_leaves(value, lambda leaf: self._real(leaf, where))

    def _real(self, leaf: Any, where: str) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        mark = self.mark_of(leaf)
        if mark is not None and mark.absent and mark.name in self._received:
            return self._received[mark.name]
        if is_fake(leaf) or (mark is not None and mark.absent):
            what = describe(mark.name if mark else None, self._units)
            raise LayoutError(
                f"pipeline: {where} ({where_in_model()}) needs a value of an earlier stage that "
                f"did not cross: {what}. The model took another way through its code than with the "
                "sample batch, keeps values from one step to the next, or computes this one in a "
                "way torch does not show (a custom autograd function outside any module). Cut "
                "elsewhere (Pipelining(cuts=[...])), or make the value an output of a module."
            )
        return leaf

    def call_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the unit, or pass it over."""
        self._check(name)
        with self.paused():
            given = tensors((args, kwargs))
            for index in self._late.get(self.calls, ()):
                self.set_mark(given[index], ("arg", self.calls, index))
            if self.calls == self._last:
                raise Over
            self._started = self._started or self.calls == self._first
            if self._started:
                args, kwargs = self.use((args, kwargs), f"the call of {name!r}")
                given = tensors((args, kwargs))
                result = self.run_unit(name, call, args, kwargs)
            else:
                result = _fill(self._templates[self.calls], (args, kwargs), self._fakes)
        self.after_call(result, given)
        return result

    def run_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit of this stage."""
        return self._replacements.get(name, call)(*args, **kwargs)

    def _check(self, name: str) -> None:
        expected = self._units[self.calls] if self.calls < len(self._units) else None
        if name != expected:
            was = "no further module" if expected is None else repr(expected)
            raise LayoutError(
                f"pipeline: the model called {name!r} as module {self.calls + 1} where with the "
                f"sample batch it was {was}. A pipeline needs the same modules in the same order "
                "for every batch."
            )


class Rehearsal(StageRun):
    """A stage whose units return zeros: shows whether everything it needs reaches it."""

    def run_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the unit would return, as zeros."""
        result = _fill(self._templates[self.calls], (args, kwargs), self._fakes)
        return change_leaves(result, zeros_like)


def zeros_like(leaf: Any) -> Any:
    """Zeros in place of a fake tensor; anything else as it is."""
    if not is_fake(leaf):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def describe(name: Name | None, units: Sequence[str]) -> str:
    """A value's name in words."""
    if name is None:
        return "a value whose origin torch does not show"
    if name[0] == "param":
        return f"the parameter {name[1]!r}"
    if name[0] == "call":
        return f"an output of {units[name[1]]!r}"
    if name[0] == "arg":
        return f"an input of {units[name[1]]!r}"
    after = f"after {units[name[1] - 1]!r}" if name[1] else "before the first module"
    return f"a value computed {after}"


def where_in_model(frames: traceback.StackSummary | None = None) -> str:
    """The line of the model's code that is running, or that ``frames`` end in."""
    for frame in reversed(frames or traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if "/torch/" not in path and "/paceline/parallel/pipeline/" not in path:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown place"


def _template(result: Any, given: Any) -> Any:
    known = {id(leaf): index for index, leaf in enumerate(leaves(given))}

    def slot_of(leaf: Any) -> Any:
        if isinstance(leaf, _PLAIN):
            return leaf
        if id(leaf) in known:
            return _Slot(None, known[id(leaf)])
        return _Slot(spec_of(leaf), None) if isinstance(leaf, Tensor) else leaf

    return change_leaves(result, slot_of)


class _Slot:
    """A place in what a unit returns: a new tensor, or something it was given."""

    def __init__(self, spec: Spec | None, given: int | None) -> None:
        self.spec, self.given = spec, given


def _fill(template: Any, given: Any, fakes: Fakes) -> Any:
    """What a unit returns, with fakes for tensors; ``template`` comes from :func:`_template`."""
    known = leaves(given)

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        if leaf.given is not None:
            return known[leaf.given]
        assert leaf.spec is not None
        return fakes.tensor(leaf.spec)

    return change_leaves(template, make)
