"""Running one stage: its own units for real, those before it passed over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.errors import LayoutError
from paceline.nested import map_leaves, tensors
from paceline.parallel.pipeline.fake_tensors import Fakes, is_fake
from paceline.parallel.pipeline.templates import fill, zeros_like
from paceline.parallel.pipeline.tracing import Mark, Name, Over, Run
from paceline.parallel.pipeline.words import describe, where_in_model


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
        pass_over: Callable[[str, Any, Any, Any], None],
    ) -> None:
        super().__init__()
        self._fakes, self._units, self._templates, self._late = fakes, units, templates, late
        self._first, self._last = first, last
        self._received, self._wanted = received, frozenset(wanted)
        self._replacements, self._pass_over = replacements, pass_over
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
        return map_leaves(value, lambda leaf: self._real(leaf, where))

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
            given = list(tensors((args, kwargs)))
            for index in self._late.get(self.calls, ()):
                self.set_mark(given[index], ("arg", self.calls, index))
            if self.calls == self._last:
                raise Over
            self._started = self._started or self.calls == self._first
            if self._started:
                args, kwargs = self.use((args, kwargs), f"the call of {name!r}")
                given = list(tensors((args, kwargs)))
                result = self.run_unit(name, call, args, kwargs)
            else:
                result = fill(self._templates[self.calls], (args, kwargs), self._fakes)
                self._pass_over(name, args, kwargs, result)
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
        result = fill(self._templates[self.calls], (args, kwargs), self._fakes)
        result = map_leaves(result, zeros_like)
        self._pass_over(name, args, kwargs, result)
        return result
