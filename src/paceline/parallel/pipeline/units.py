"""The modules between which a model can be cut, and how calls to them are caught.

A unit runs whole on one stage: a repeated block, or outside blocks a module without children that
holds parameters or saved buffers. All other code of the model is glue, which every stage runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.blocks import find_blocks
from paceline.parallel.pipeline.cut_plan import CutPlan
from paceline.parallel.pipeline.fake_tensors import Fakes
from paceline.parallel.pipeline.shape_run import NeedsValues, ShapeRun
from paceline.parallel.pipeline.tracing import ModelRun, StageEnd, where_in_model
from paceline.randomness import ForwardRandomness
from paceline.torch_internals import NEEDS_DATA

ParameterSlot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


class Catcher(Protocol):
    """Is called instead of a unit."""

    def call_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``call(*args, **kwargs)`` would run the unit."""


def find_units(model: nn.Module, extra: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The units of ``model`` by name; modules named in ``extra`` are units too."""
    blocks = set(find_blocks(model)) | set(extra)
    units: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def look(module: nn.Module, name: str) -> None:
        if module in seen:
            return
        seen.add(module)
        is_leaf = next(module.children(), None) is None
        if name in blocks or (is_leaf and _has_state(module)):
            units[name] = module
            seen.update(module.modules())
            return
        for key, child in module.named_children():
            look(child, f"{name}.{key}" if name else key)

    look(model, "")
    return units


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or bool(module.state_dict())


def slots_of(model: nn.Module) -> dict[str, list[ParameterSlot]]:
    """Where each parameter is held, by its name in ``model.named_parameters()``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots: dict[str, list[ParameterSlot]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                slots[names[id(parameter)]].append((module, key))
    return slots


class Catching:
    """Catches calls to units while a catcher is at work.

    Their classes get a subclass with another ``__call__``: it comes before every hook, also those
    that FSDP and tensor parallelism add later, and leaves modules and their names alone.
    """

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self._names = {id(module): name for name, module in units.items()}
        self._units = units
        self._catcher: Catcher | None = None
        self._classes: dict[type, type] = {}
        for module in units.values():
            module.__class__ = self._catching(type(module))

    def restore(self) -> None:
        """Give the units their own classes back."""
        own = {caught: original for original, caught in self._classes.items()}
        for module in self._units.values():
            module.__class__ = own[type(module)]

    @contextmanager
    def by(self, catcher: Catcher) -> Iterator[None]:
        """Let ``catcher`` have the calls."""
        before, self._catcher = self._catcher, catcher
        try:
            yield
        finally:
            self._catcher = before

    def _catching(self, kind: type) -> type:
        if kind not in self._classes:
            catching = self

            def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
                catcher, name = catching._catcher, catching._names.get(id(module))

                def call(*args: Any, **kwargs: Any) -> Any:
                    return kind.__call__(module, *args, **kwargs)

                if catcher is None or name is None:
                    return call(*args, **kwargs)
                return catcher.call_unit(name, call, args, kwargs)

            self._classes[kind] = type(
                kind.__name__,
                (kind,),
                {
                    "__call__": __call__,
                    "__module__": kind.__module__,
                    "__qualname__": kind.__qualname__,
                    "__doc__": kind.__doc__,
                },
            )
        return self._classes[kind]


Binding = tuple[ParameterSlot, nn.Parameter, str]
"""Where to put which parameter for a while, and its name."""


_CPU = torch.device("cpu")


class Skeleton:
    """A model with its units: caught, run as shapes, or run as stages.

    Made before the model's parameters move: keeps fake twins of its units and parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        extra: Sequence[str] = (),
        home: torch.device = _CPU,
    ) -> None:
        self.model = model
        self.units = find_units(model, extra)
        self.fakes = Fakes(home)
        self.slots = slots_of(model)
        self.fake_parameters = {
            name: self.fakes.parameter(parameter) for name, parameter in model.named_parameters()
        }
        self.twins = {name: self._twin(name, unit) for name, unit in self.units.items()}
        self._hooks = {name: _forward_hooks(unit) for name, unit in self.units.items()}
        self.catching = Catching(self.units)
        self.randomness: ForwardRandomness | None = None

    def _twin(self, name: str, unit: nn.Module) -> nn.Module:
        try:
            return self.fakes.twin(unit)
        except (TypeError, RuntimeError) as error:
            raise LayoutError(
                f"pipeline: {name!r} ({type(unit).__name__}) cannot be copied ({error}), but the "
                "stages that do not hold it need a copy without data to know its outputs. Make it "
                "work with copy.deepcopy."
            ) from error

    def pass_over(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Let the user's hooks on a unit see what it would have returned, had it been called."""
        if self.randomness is not None:
            self.randomness.passed_over(self.units[name])
        for hook, with_kwargs in self._hooks[name]:
            given = (args, kwargs) if with_kwargs else (args,)
            hook(self.units[name], *given, result)

    def stands_in(self, names: Iterable[str]) -> list[Binding]:
        """Fakes for the parameters ``names``, wherever they are held."""
        return [(slot, self.fake_parameters[n], n) for n in names for slot in self.slots[n]]

    def stage_bindings(
        self, plan: CutPlan, stage: int, own: Callable[[str], nn.Parameter]
    ) -> list[Binding]:
        """What code between units finds as parameters on ``stage``: ``own`` ones, or fakes."""
        inside = {m for name in plan.units_of(stage) for m in self.units[name].modules()}
        bindings: list[Binding] = []
        for name in plan.used_in_glue:
            parameter = own(name) if stage in plan.holders[name] else self.fake_parameters[name]
            slots = [s for s in self.slots[name] if s[0] not in inside]
            bindings += [(slot, parameter, name) for slot in slots]
        return bindings

    @contextmanager
    def running(self, run: Any, bindings: Sequence[Binding]) -> Iterator[None]:
        """Let ``run`` see the model's calls, with ``bindings`` in place, until a stage ends."""
        assert isinstance(run, ModelRun)
        with ExitStack() as stack:
            stack.enter_context(_bound(bindings))
            for _, parameter, name in bindings:
                run.set_mark(parameter, ("param", name))
            stack.enter_context(self.catching.by(run))  # type: ignore[arg-type]
            stack.enter_context(run)
            with suppress(StageEnd):
                yield

    def shapes(
        self, probe: Callable[[], Any], parameters: Iterable[str], **options: Any
    ) -> ShapeRun:
        """Run the model, which ``probe`` calls, on fakes; also for its ``parameters``."""
        self._follow_modes()
        bindings = self.stands_in(parameters)
        run = ShapeRun(self.fakes, self.units, self.twins, **options)
        try:
            self._shapes(run, bindings, probe)
        except NEEDS_DATA as error:
            # Perhaps all modules were through, and only the loss looks at values.
            again = ShapeRun(self.fakes, self.units, self.twins, real_after=run.calls, **options)
            try:
                self._shapes(again, bindings, probe)
            except (NeedsValues, *NEEDS_DATA) as second:
                raise _needs_values(error, run) from second
            run = again
        return run

    def _shapes(self, run: ShapeRun, bindings: Sequence[Binding], probe: Callable[[], Any]) -> None:
        try:
            with _unchanged_rng(self.model), self.running(run, bindings):
                run.note(probe(), run.place + 1)
        finally:
            run.give_back()

    def _follow_modes(self) -> None:
        """Let the twins train or evaluate as their originals do."""
        for name, unit in self.units.items():
            modes = {path: module.training for path, module in unit.named_modules()}
            for path, module in self.twins[name].named_modules():
                module.training = modes.get(path, unit.training)


def _forward_hooks(unit: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The hooks that are on a unit before sharding and the like add theirs."""
    return [
        (hook, number in unit._forward_hooks_with_kwargs)
        for number, hook in unit._forward_hooks.items()
    ]


@contextmanager
def _bound(bindings: Sequence[Binding]) -> Iterator[None]:
    before = [(slot, slot[0]._parameters[slot[1]]) for slot, _, _ in bindings]
    for (module, key), parameter, _ in bindings:
        module._parameters[key] = parameter
    try:
        yield
    finally:
        for (module, key), original in before:
            module._parameters[key] = original


@contextmanager
def _unchanged_rng(model: nn.Module) -> Iterator[None]:
    first: Tensor | None = next(model.parameters(), None)
    on_gpu = first is not None and first.device.type == "cuda"
    with torch.random.fork_rng(devices=[first.device] if on_gpu and first is not None else []):
        yield


def _needs_values(error: Exception, run: ShapeRun) -> LayoutError:
    after = f"after {run.units[-1]!r}" if run.units else "before the first module"
    line = where_in_model(traceback.extract_tb(error.__traceback__))
    return LayoutError(
        f"pipeline: between its modules the model looks at values that a module computed ({after}, "
        f"{line}; {error}). Stages that do not hold that module know shapes alone, so they cannot "
        "follow. Move that code into a module that is called as a whole, or train without pp."
    )
