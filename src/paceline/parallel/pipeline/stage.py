"""One stage of a pipeline on the rank that holds it: its modules, and how it runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.log_values import LogSink, Recording, closed, recording
from paceline.nested import map_leaves, tensors
from paceline.parallel.loss_term import Term
from paceline.parallel.pipeline.activations import enter, leave
from paceline.parallel.pipeline.cut_plan import CutPlan
from paceline.parallel.pipeline.fake_tensors import Fakes, fill, is_fake, zeros_like
from paceline.parallel.pipeline.shape_run import ShapeRun
from paceline.parallel.pipeline.tracing import (
    Mark,
    ModelRun,
    Name,
    StageEnd,
    describe,
    where_in_model,
)
from paceline.parallel.pipeline.units import Skeleton
from paceline.parallel.sync_batchnorm import not_counting
from paceline.randomness import ForwardRandomness


class StageRun(ModelRun):
    """One stage: the calls ``first`` to ``last`` of units for real, those before as fakes.

    ``received`` are values of earlier stages by name; ``wanted`` those that later stages need. Ends
    with ``StageEnd`` at the call ``last``, unless that is past the end of the model.
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
        self.recording: Recording | None = None
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
                raise StageEnd
            if self.calls == self._first:
                self._started = True
                if self.recording is not None:  # what came before was logged by earlier stages
                    self.recording.open = True
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


class StageRehearsal(StageRun):
    """A stage whose units return zeros: shows whether everything it needs reaches it."""

    def run_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the unit would return, as zeros."""
        result = fill(self._templates[self.calls], (args, kwargs), self._fakes)
        result = map_leaves(result, zeros_like)
        self._pass_over(name, args, kwargs, result)
        return result


Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Microbatch:
    """One microbatch on its way through a step."""

    part: Any
    items: int
    shapes: ShapeRun
    """What is known of the model for a part of these shapes."""


@dataclass
class PipelineStep:
    """One step on this rank: what its stages are given to work on, and what they computed."""

    microbatches: list[Microbatch] = field(default_factory=list)
    scale: Tensor | None = None
    keep_output: bool = False
    terms: list[Term] = field(default_factory=list)
    failure: Exception | None = None
    randomness: ForwardRandomness | None = None
    """What the microbatches draw from."""
    sink: LogSink | None = None
    """Where what the model logs goes."""

    def drawing(self, part: Any) -> None:
        """``part`` goes through the model next; None: nothing does."""
        if self.randomness is not None and part is not None:
            self.randomness.select(part)
        elif self.randomness is not None:
            self.randomness.finish()


class StageModule(nn.Module):
    """The modules of one stage, under their names in the model; ``forward`` runs the stage.

    Sharding, tensor parallelism and activation checkpointing change it in place like any module.
    """

    def __init__(self, work: StageWork) -> None:
        super().__init__()
        object.__setattr__(self, "_work", work)

    def __call__(self, *received: Tensor, **nothing: None) -> Any:
        """Run the next microbatch, with an argument at least.

        On a GPU, FSDP moves the arguments of its root there and fails where there are none
        (``IndexError``, torch 2.11), as in a call of the first stage.
        """
        return super().__call__(*received, **{"placeholder": None, **nothing})

    def forward(self, *received: Tensor, placeholder: None = None) -> tuple[Tensor, ...] | Tensor:
        """What goes to the next stage, or the loss on the last."""
        work: StageWork = self._work  # type: ignore[assignment]
        return work.run_next(received)


class _Branch(nn.Module):
    """Stands for a container of the model of which a stage holds only some modules."""


class _ListBranch(nn.ModuleList):
    """The same for a list of modules, so that its blocks are still seen to be repeated."""


class StageWork:
    """Builds a stage's ``StageModule`` and runs it on microbatches, one after the other."""

    def __init__(
        self,
        module: nn.Module,
        skeleton: Skeleton,
        plan: CutPlan,
        index: int,
        *,
        device: torch.device,
        context: Context,
        step: PipelineStep,
        taken: set[int],
    ) -> None:
        self.index = index
        self._skeleton, self._plan = skeleton, plan
        self._called, self._device, self._context = module, device, context
        self._step = step
        self._first, self._last = plan.span(index)
        self.receives = plan.crossing[index - 1] if index else ()
        self.sends = plan.crossing[index] if index < plan.stages - 1 else ()
        self._done = 0
        # Where this stage holds each of its parameters: (module, key), by name in the model.
        self.homes: dict[str, list[tuple[nn.Module, str]]] = {}
        self._replacements: dict[str, nn.Module] = {}
        self.module = StageModule(self)
        self._build(taken)

    @property
    def is_last(self) -> bool:
        """Whether this stage ends in the loss."""
        return self.index == self._plan.stages - 1

    def start(self) -> None:
        """Begin a step: the next microbatch is the first."""
        self._done = 0

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter ``name`` of the model, as this stage holds it now."""
        module, key = self.homes[name][0]
        parameter = module._parameters[key]
        assert parameter is not None
        return parameter

    def run_next(self, received: Sequence[Tensor]) -> tuple[Tensor, ...] | Tensor:
        """Run the next microbatch on what the stage before has sent."""
        microbatch = self._step.microbatches[self._done]
        self._done += 1
        self._step.drawing(microbatch.part)
        try:
            return self._run(microbatch, received)
        except Exception as error:
            self._step.failure = error
            raise
        finally:
            self._step.drawing(None)

    def _run(self, microbatch: Microbatch, received: Sequence[Tensor]) -> Any:
        specs = [microbatch.shapes.specs[name] for name in self.receives]
        run = StageRun(
            fakes=self._skeleton.fakes,
            units=self._plan.units,
            templates=microbatch.shapes.templates,
            late=self._plan.late,
            first=self._first,
            last=self._last,
            received=dict(zip(self.receives, enter(received, specs), strict=True)),
            wanted=self.sends,
            replacements=self._replacements,
            pass_over=self._skeleton.pass_over,
        )
        bindings = self._skeleton.stage_bindings(self._plan, self.index, self.parameter)
        term: Term | None = None
        # A microbatch without items is a placeholder: it takes part and counts for nothing.
        aside = nullcontext() if microbatch.items else not_counting(self.module)
        logging = recording(self._step.sink, microbatch.items)
        with self._context(), aside, logging, closed() as run.recording:
            if run.recording is not None:
                run.recording.open, run.recording.apart = self._first == 0, run.paused
            with self._skeleton.running(run, bindings):
                result = self._called(microbatch.part, microbatch.items or 1)
                term = run.use(result, "the loss")
        if self.is_last:
            assert term is not None
            return self._loss(term, microbatch.items)
        missing = [name for name in self.sends if name not in run.found]
        if term is not None or missing:
            raise LayoutError(
                f"pipeline: stage {self.index} ended before the next one began: with this batch "
                f"the model does not call {self._plan.units[self._last]!r}. A pipeline needs the "
                "same modules in the same order for every batch."
            )
        self._check_shapes(run, microbatch)
        return leave([run.found[name] for name in self.sends], self._device)

    def _check_shapes(self, run: StageRun, microbatch: Microbatch) -> None:
        for name in self.sends:
            found, spec = run.found[name], microbatch.shapes.specs[name]
            if (tuple(found.shape), found.dtype) != (spec.shape, spec.dtype):
                raise LayoutError(
                    f"pipeline: stage {self.index} computed {found.dtype} {tuple(found.shape)} "
                    f"where the next stage expects {spec.dtype} {spec.shape}. The model's shapes "
                    "depend on the values it computes, or on how its modules are split."
                )

    def _loss(self, term: Term, items: int) -> Tensor:
        total = term.total if items else term.total * 0
        scale = self._step.scale
        scaled = total if scale is None else total * scale.to(total.dtype)
        self._step.terms.append(
            Term(
                total.detach(),
                (term.count if items else 0),
                term.output if self._step.keep_output else None,
            )
        )
        return scaled.reshape(1).clone()  # torch detaches it in place, which a view forbids

    def _build(self, taken: set[int]) -> None:
        """Fill the module; parameters in ``taken`` are held by another stage of this rank."""
        copies: dict[int, nn.Parameter] = {}
        plan, skeleton = self._plan, self._skeleton
        held = {name for name, stages in plan.holders.items() if self.index in stages}
        name_of = {(id(m), key): n for n, slots in skeleton.slots.items() for m, key in slots}
        called = set(plan.units_of(self.index))
        for path in plan.modules_of(self.index):
            original = skeleton.units[path]
            names = {
                name_of[id(m), k]
                for m in original.modules()
                for k in m._parameters
                if m._parameters[k] is not None
            }
            if path not in called and not names <= held:
                continue  # never called, and its parameters live elsewhere
            unit = original
            if id(original) in taken:
                unit = copy.deepcopy(original)
                self._replacements[path] = unit
            taken.add(id(original))
            for (_, old), (_, new) in zip(
                original.named_modules(), unit.named_modules(), strict=True
            ):
                for key, parameter in new._parameters.items():
                    if parameter is None:
                        continue
                    name = name_of[id(old), key]
                    new._parameters[key] = self._own(parameter, taken, copies, name)
                    self.homes.setdefault(name, []).append((new, key))
            self._place(path, unit)
        for name in sorted(held - set(self.homes)):
            self._hold_directly(name, taken, copies)
        taken.update(id(parameter) for parameter in self.module.parameters())

    def _own(
        self,
        parameter: nn.Parameter,
        taken: set[int],
        copies: dict[int, nn.Parameter],
        name: str,
    ) -> nn.Parameter:
        """``parameter``, or this stage's copy of it where another stage of the rank has it."""
        before = self.homes.get(name)
        if before:  # tied within the stage
            return self.parameter(name)
        if id(parameter) not in taken:
            return parameter
        if id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(
                parameter.detach().clone(), requires_grad=parameter.requires_grad
            )
        return copies[id(parameter)]

    def _hold_directly(self, name: str, taken: set[int], copies: dict[int, nn.Parameter]) -> None:
        """Hold a parameter that code between units uses."""
        owner, key = self._skeleton.slots[name][0]
        parameter = owner._parameters[key]
        assert parameter is not None
        path, _, last = name.rpartition(".")
        branch = self._branch(path)
        branch.register_parameter(last, self._own(parameter, taken, copies, name))
        self.homes[name] = [(branch, last)]

    def _branch(self, path: str) -> nn.Module:
        at: nn.Module = self.module
        so_far: list[str] = []
        for part in path.split(".") if path else ():
            so_far.append(part)
            if part not in at._modules:
                original = self._skeleton.model.get_submodule(".".join(so_far))
                kinds = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
                at._modules[part] = _ListBranch() if isinstance(original, kinds) else _Branch()
            child = at._modules[part]
            assert child is not None
            at = child
        return at

    def _place(self, path: str, unit: nn.Module) -> None:
        parent, _, last = path.rpartition(".")
        self._branch(parent)._modules[last] = unit
