"""A pipeline on one of its ranks: the stages it holds, run by one of torch's schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

import paceline.parallel.pipeline.tied_weights as tied
from paceline.layout.pipeline_schedules import check_schedule
from paceline.log_values import LogSink
from paceline.options import Pipelining
from paceline.parallel.loss_term import Term
from paceline.parallel.pipeline.activations import wire_spec
from paceline.parallel.pipeline.cut_plan import CutPlan
from paceline.parallel.pipeline.cutting import model_of
from paceline.parallel.pipeline.shape_run import ShapeRun, signature
from paceline.parallel.pipeline.stage import (
    Context,
    Microbatch,
    PipelineStep,
    StageModule,
    StageWork,
)
from paceline.parallel.pipeline.torch_schedules import LiveForwards, Stage, Wire, make_schedule
from paceline.parallel.pipeline.units import Skeleton
from paceline.randomness import ForwardRandomness
from paceline.world import objects

_SHAPES_KEPT = 64
"""How many kinds of batch are remembered; a new one costs a run of the model on fake tensors."""
_SCHEDULES_KEPT = 4

Part = tuple[Any, int]
"""A microbatch and how many items its loss is a mean over; none for a placeholder."""


class Pipeline:
    """The stages of ``plan`` that ``rank`` of ``pp`` holds; peers talk over ``group``.

    Takes ``module`` over: parameters of other stages leave this rank's memory (they become meta
    tensors), and calls to its modules are caught while a stage runs. ``stages`` may be sharded,
    split and so on in place before the first step. ``context`` is entered around each forward.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: CutPlan,
        *,
        rank: int,
        pp: int,
        group: ProcessGroup | None,
        device: torch.device,
        options: Pipelining | None = None,
        context: Context = contextlib.nullcontext,
    ) -> None:
        self.plan, self.options = plan, options or Pipelining()
        self._module, self._group, self._device, self._context = module, group, device, context
        self._rank, self._pp = rank, pp
        held = self.options.placement(pp)
        self._rank_of = [next(r for r in range(pp) if s in held[r]) for s in range(plan.stages)]
        self._skeleton = Skeleton(model_of(module), plan.extra_units, device)
        self._step = PipelineStep()
        self._live = LiveForwards()
        taken: set[int] = set()
        self._work = [
            StageWork(
                module,
                self._skeleton,
                plan,
                index,
                device=device,
                context=context,
                step=self._step,
                taken=taken,
            )
            for index in sorted(held[rank])
        ]
        self._drop_absent()
        self._shapes: dict[Any, ShapeRun] = {}
        self._schedules: dict[int, tuple[Any, list[Stage]]] = {}
        self._ties_checked = False
        self._sink: LogSink | None = None

    @property
    def stages(self) -> list[StageModule]:
        """The modules of this rank's stages."""
        return [work.module for work in self._work]

    @property
    def holds_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._work[-1].is_last

    @property
    def most_live(self) -> int:
        """The most forwards whose backward was still owed at once, in the steps so far.

        Counted per stage: a microbatch in two stages of this rank counts twice.
        """
        return self._live.most

    def follow_draws(self, randomness: ForwardRandomness) -> None:
        """Let ``randomness`` know which microbatch a stage runs, and which calls others run."""
        self._step.randomness = self._skeleton.randomness = randomness

    def log_to(self, sink: LogSink) -> None:
        """What the model logs in steps and evaluations goes to ``sink``."""
        self._sink = sink

    def minimum(self, at_least: int = 1) -> int:
        """The fewest microbatches, from ``at_least`` up, that the schedule can run."""
        return self.options.microbatches_for(self._pp, at_least)

    def held(self) -> dict[str, list[nn.Parameter]]:
        """This rank's parameters by their names in the model; two for a weight tied over stages."""
        found: dict[str, list[nn.Parameter]] = {}
        for work in self._work:
            for name in work.homes:
                found.setdefault(name, []).append(work.parameter(name))
        return {name: found[name] for name in self.plan.holders if name in found}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the model; copies under one name."""
        for name, copies in self.held().items():
            for parameter in copies:
                yield name, parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that are on this rank; those outside any stage's modules are on every one."""
        for name, buffer in self._skeleton.model.named_buffers():
            if not buffer.is_meta:
                yield name, buffer

    def duplicates(self) -> list[nn.Parameter]:
        """Parameters of this rank that an earlier stage holds too: count them there."""
        return [
            work.parameter(name)
            for work in self._work
            for name in work.homes
            if work.index != self.plan.holders[name][0]
        ]

    def step(self, parts: list[Part], scale: Tensor | None = None) -> list[Term | None]:
        """Forward and backward of all microbatches; gradients of ``total * scale`` add up.

        Every rank of the pipeline gives the same parts. The rank of the last stage gets their
        terms, without outputs; the others ``None``.
        """
        check_schedule(self.options.schedule, self._pp, len(parts), self.options.stages_per_rank)
        self._start(parts, scale)
        schedule, stages = self._schedule(len(parts))
        for stage, work in zip(stages, self._work, strict=True):
            stage.set_shapes(self._wires(work.receives), self._wires(work.sends))
        try:
            with torch.enable_grad():
                # The target is never looked at, but torch computes no loss without one.
                schedule.step(target=torch.zeros(len(parts)), losses=[])
        except RuntimeError:
            self._schedules.clear()  # they hold pieces of a step that never ended
            self._live.now = 0
            if self._step.failure is not None:
                raise self._step.failure from None
            raise
        return self._finish(len(parts))

    @torch.no_grad()
    def evaluate(self, parts: list[Part], purpose: Hashable = None) -> list[Term | None]:
        """The terms of all microbatches, with their outputs, on the rank of the last stage.

        ``purpose`` tells apart calls in which the module computes other things of equal batches.
        """
        self._start(parts, None, purpose)
        self._step.keep_output = True
        sends: list[Any] = []
        for number in range(len(parts)):
            passed: Any = ()
            # One microbatch after the other through all stages of a rank: in this order no two
            # ranks wait for each other, on any backend and with any placement.
            for work in self._work:
                received = self._receive(work, number, passed)
                passed = work.module(*received)
                if not work.is_last and self._rank_of[work.index + 1] != self._rank:
                    peer = self._rank_of[work.index + 1]
                    sends += self._begin(dist.isend, passed, peer)
        for send in sends:
            send.wait()
        for module in (m for work in self._work for m in work.module.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # a backward would have done so
        return self._finish(len(parts))

    def copy_tied(self) -> None:
        """Give every copy of a weight that several stages hold the values of the first."""
        for name, holders in self.plan.holders.items():
            copies = {w.index: w.parameter(name) for w in self._work if name in w.homes}
            if len(holders) > 1 and copies:
                tied.copy_values(copies, holders, self._rank_of, self._group)

    def sync_tied(self) -> None:
        """Sum the gradients of weights that several stages hold: after the last backward."""
        shared = {name: held for name, held in self.plan.holders.items() if len(held) > 1}
        held = {
            name: {w.index: w.parameter(name) for w in self._work if name in w.homes}
            for name in shared
        }
        if shared and not self._ties_checked:
            self._check_ties(held)
        for name, copies in held.items():
            if any(parameter.requires_grad for parameter in copies.values()):
                tied.sum_gradients(name, copies, shared[name], self._rank_of, self._group)

    def _check_ties(self, held: dict[str, dict[int, nn.Parameter]]) -> None:
        """Once, all ranks together: copies that are split differently cannot be added."""
        own = {name: {s: tied.looks(p) for s, p in copies.items()} for name, copies in held.items()}
        everyone = objects.all_gather(own, self._group)
        for name in own:
            seen = {stage: look for looks in everyone for stage, look in looks[name].items()}
            tied.check_alike(name, seen)
        self._ties_checked = True

    def _start(self, parts: list[Part], scale: Tensor | None, purpose: Hashable = None) -> None:
        known = [self._known(part, purpose) for part, _ in parts]
        microbatches = [
            Microbatch(part, items, shapes)
            for (part, items), shapes in zip(parts, known, strict=True)
        ]
        self._step.microbatches = microbatches
        self._step.scale = scale
        self._step.terms = []
        self._step.failure = None
        self._step.keep_output = False
        self._step.sink = self._sink if purpose is None else None
        for work in self._work:
            work.start()

    def _finish(self, number: int) -> list[Term | None]:
        terms: list[Term | None] = [*self._step.terms]
        self._step.terms = []
        self._step.microbatches = []
        return terms if self.holds_last else [None] * number

    def _receive(self, work: StageWork, number: int, passed: Any) -> Any:
        if work.index == 0 or self._rank_of[work.index - 1] == self._rank:
            return passed
        buffers = [
            torch.empty(shape, dtype=dtype, device=self._device)
            for shape, dtype in self._wires(work.receives)[number]
        ]
        peer = self._rank_of[work.index - 1]
        for pending in self._begin(dist.irecv, buffers, peer):
            pending.wait()
        return buffers

    def _begin(self, operation: Any, values: Any, peer: int) -> list[Any]:
        """Send ``values`` to the rank ``peer``, or receive them, as one batch."""
        messages = [dist.P2POp(operation, v, group=self._group, group_peer=peer) for v in values]
        return dist.batch_isend_irecv(messages) if messages else []

    def _wires(self, names: Any) -> list[list[Wire]]:
        """How the values ``names`` of each microbatch travel."""
        return [
            [wire_spec(microbatch.shapes.specs[name]) for name in names]
            for microbatch in self._step.microbatches
        ]

    def _known(self, part: Any, purpose: Hashable) -> ShapeRun:
        """What the model's modules return for a batch of this shape."""
        key = (signature(part), self._skeleton.model.training, purpose)
        if key not in self._shapes:
            while len(self._shapes) >= _SHAPES_KEPT:
                del self._shapes[next(iter(self._shapes))]
            with self._context():
                self._shapes[key] = self._skeleton.shapes(
                    lambda: self._module(part, 1),
                    self.plan.holders,
                    calls_wanted=len(self.plan.units),
                )
        return self._shapes[key]

    def _schedule(self, microbatches: int) -> tuple[Any, list[Stage]]:
        if microbatches not in self._schedules:
            if len(self._schedules) >= _SCHEDULES_KEPT:
                self._schedules.clear()
            assert self._group is not None
            stages = [
                Stage(
                    work.module,
                    work.index,
                    self.plan.stages,
                    self._device,
                    self._group,
                    self._live,
                    inputs=len(work.receives),
                    outputs=len(work.sends),
                )
                for work in self._work
            ]
            schedule = make_schedule(self.options.schedule, stages, microbatches)
            self._schedules[microbatches] = schedule, stages
        return self._schedules[microbatches]

    def _drop_absent(self) -> None:
        """Let go of what other ranks hold."""
        kept = {id(m) for work in self._work for m in work.module.modules()}
        for unit in self._skeleton.units.values():
            if id(unit) not in kept:
                unit.to("meta")
        for slots in self._skeleton.slots.values():
            for module, key in slots:
                parameter = module._parameters[key]
                if id(module) not in kept and parameter is not None and not parameter.is_meta:
                    module._parameters[key] = nn.Parameter(
                        parameter.detach().to("meta"), parameter.requires_grad
                    )
