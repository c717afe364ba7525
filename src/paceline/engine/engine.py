"""The engine: a model, its loss and its optimizer on a layout. Its one verb is ``step``."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.engine import nonfinite, peers
from paceline.engine.alone import step_alone
from paceline.engine.arguments import (
    OptimizerFactory,
    Schedule,
    check_arguments,
    refuse_unknown,
)
from paceline.engine.batch import move, placeholder
from paceline.engine.checks import (
    check_loss_parameters,
    check_model_and_options,
    check_optimizer,
    check_schedule,
    rules_on_frozen,
)
from paceline.engine.gradients import Gradients
from paceline.engine.local import Rounds
from paceline.engine.loss import LossFunction, LossModule
from paceline.engine.memory import Memory, MemoryMeter
from paceline.engine.nonfinite import Problem
from paceline.engine.parts import Parts
from paceline.engine.passes import Evaluated, Passes, Sums
from paceline.engine.precision import Precision
from paceline.engine.reducing import Reducing
from paceline.engine.repoint import Groups
from paceline.engine.result import Numbers, StepResult
from paceline.engine.split import Clock
from paceline.engine.starting import (
    check_copies_are_equal,
    check_not_spread,
    make_values,
    mark_as_spread,
    start_from_one_model,
    start_from_one_optimizer,
)
from paceline.engine.state import State
from paceline.engine.traffic import Traffic, traffic
from paceline.engine.wiring import Wiring
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.options import (
    Compression,
    EngineOptions,
    LocalSteps,
    Pipelining,
    Recompute,
    Reduction,
    Sharding,
    TensorParallel,
)
from paceline.options.engine import InitialWeights, Nonfinite
from paceline.options.engine import Precision as PrecisionName
from paceline.options.rules import Combination, check_rules
from paceline.parallel import sync_batchnorm
from paceline.parallel.compose import needs_sample, spread
from paceline.parallel.device_map import DeviceLike
from paceline.parallel.meta import is_on_meta
from paceline.parallel.offload import offload_state
from paceline.parallel.replicate import sync_buffers
from paceline.parallel.spread import Spread
from paceline.parallel.term import Term
from paceline.world import World, collectives

# Ranks with different ones would not compute one step; most others would not even meet.
_SAME_ON_ALL_RANKS = (
    "precision",
    "clip_norm",
    "clip_value",
    "nonfinite",
    "sync_batchnorm",
    "initial_weights",
)


class Engine:
    """Trains ``model`` one global batch at a time, on any layout.

    Args:
        model: the model; it is spread over the ranks in place.
        optimizer: an optimizer over the model's parameters, or a function that makes one from them.
        loss: called as ``loss(output, target)``, it returns a mean over samples, or a pair
            ``(sum, count)``. Leave it out for a model that returns its own loss.
        world: the world to train in; by default the one this process was launched into.
        layout: How work is spread over the ranks, such as 'dp=2' or 'dp=2,zero=3,tp=2'; auto:
            data-parallel over all of them.
        microbatch: The most samples a rank puts through the model at once; a larger share of
            the batch is cut into near-equal parts whose gradients add up. None: the whole share
            at once.
        precision: Number format of the forward and backward pass: fp32, bf16 or fp16 (autocast;
            fp16 with a gradient scaler), or fp64, in which the whole model computes.
        clip_norm: Clip the norm of the whole gradient to this. None: no clipping.
        clip_value: Clip each element of the gradient to this. None: no clipping.
        schedule: A function from the step (0, 1, …) to a factor on each group's learning rate,
            or one of torch's schedulers.
        compile: Compile the model with torch.compile.
        nonfinite: On NaN or Inf in the loss or the gradient: stop the run (on a GPU one step
            later), skip the step, or ignore it.
        sync_batchnorm: Batch-norm statistics over all ranks' samples instead of each rank's
            own.
        forward: Called as forward(model, batch), it returns the loss: for models that need more
            than being called with their batch.
        count: Called as count(batch), it says over how many items the loss of a batch is a
            mean, where that is not the samples.
        sharding: How zero shards the model.
        tensor: How tp splits layers.
        pipeline: How pp cuts and runs the model.
        checkpoint_activations: Recompute activations in the backward pass: of every block
            (full), of every n-th (a number), or of all but the costly operators (selective).
        device_map: Put parts of the model on several devices of one process: names to devices,
            or auto.
        max_memory: With a device map: how much of each device it may use, such as {'cuda:0':
            '20GiB'}.
        init: Called with each module of a model from the meta device, to give it values.
        compress: In which form gradients travel between data-parallel ranks, such as int8.
        local_steps: Data-parallel ranks train alone for this many steps and then meet.
        reduction: How gradients are summed over the ranks.
        initial_weights: What ranks start from: the model that rank 0 has built, or each its
            own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | OptimizerFactory,
        loss: LossFunction | None = None,
        world: World | None = None,
        layout: str | Layout = "auto",
        microbatch: int | None = None,
        precision: PrecisionName = "fp32",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        schedule: Schedule | None = None,
        compile: bool = False,
        nonfinite: Nonfinite = "stop",
        sync_batchnorm: bool = False,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        count: Callable[[Any], int | Tensor] | None = None,
        sharding: Sharding | None = None,
        tensor: TensorParallel | None = None,
        pipeline: Pipelining | None = None,
        checkpoint_activations: Recompute | str | int | None = None,
        device_map: str | Mapping[str, DeviceLike] | None = None,
        max_memory: Mapping[DeviceLike, int | str] | None = None,
        init: Callable[[nn.Module], None] | None = None,
        compress: Compression | str | None = None,
        local_steps: LocalSteps | int | None = None,
        reduction: Reduction | None = None,
        initial_weights: InitialWeights = "rank0",
        **unknown: Never,
    ) -> None:
        refuse_unknown(Engine, unknown)
        check_arguments(model, loss, optimizer, world)
        self.options = EngineOptions.of(
            layout=layout,
            microbatch=microbatch,
            precision=precision,
            clip_norm=clip_norm,
            clip_value=clip_value,
            schedule=schedule,
            compile=compile,
            nonfinite=nonfinite,
            sync_batchnorm=sync_batchnorm,
            forward=forward,
            count=count,
            sharding=sharding,
            tensor=tensor,
            pipeline=pipeline,
            checkpoint_activations=checkpoint_activations,
            device_map=device_map,
            max_memory=max_memory,
            init=init,
            compress=compress,
            local_steps=local_steps,
            reduction=reduction,
            initial_weights=initial_weights,
        )
        check_model_and_options(model, self.options)
        check_not_spread(model)
        self._notes = rules_on_frozen(model, self.options["compress"])
        self.world = world if world is not None else World.current()
        self.layout = Layout.parse(self.options["layout"], world_size=self.world.size)
        self.layout.check_world(self.world.size)
        self.place = self.layout.place(self.world.rank)
        check_rules(Combination(self.layout, self.options))
        self.device = self.world.device
        self.steps_done = 0
        self._same_batches = peers.SameBatches(self.layout, self.world)
        # Called each step with the finished gradients in place, before clipping and the update.
        self.observer: Callable[[Engine], None] | None = None
        # Set by whoever wants to know where the time of the next steps goes; see engine/split.py.
        self.clock: Clock | None = None
        self._pulse = self.world.pulse
        self._unread: _Unread | None = None
        self._precision = Precision(
            self.options["precision"], self.device, sharded=bool(self.layout.beyond_dp)
        )
        self._build(model, loss, optimizer)

    def _build(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        optimizer: Optimizer | OptimizerFactory,
    ) -> None:
        if self.options["sync_batchnorm"]:
            model = sync_batchnorm.convert(model)
        self.model = model
        self._local = LossModule(model, loss, self.options["forward"], self.options["count"])
        check_loss_parameters(self._local)
        self._notes += start_from_one_model(
            self._local,
            self.world,
            initial_weights=self.options["initial_weights"],
            settings={"layout": str(self.layout)}
            | {name: self.options[name] for name in _SAME_ON_ALL_RANKS},
        )
        self._on_meta = is_on_meta(model)
        self._is_mapped = self.options["device_map"] is not None
        # Sharding and device maps move what they keep there; a sample runs where its batch is.
        sharded = self.layout.zero and not needs_sample(self.layout, self.options)
        if not self._on_meta and not sharded and not self._is_mapped:
            self._local.to(self.device)
        self._precision.prepare(self._local)
        self._parameters = list(model.parameters())
        self.parameter_count = sum(p.numel() for p in self._parameters)
        self._trainable = [p.requires_grad for p in self._parameters]
        if not isinstance(optimizer, Optimizer) and callable(optimizer):
            optimizer = optimizer([p for p in self._parameters if p.requires_grad])
        check_optimizer(optimizer, model)
        self.optimizer = optimizer
        check_schedule(self.options["schedule"], self.optimizer)
        start_from_one_optimizer(optimizer, model, self.world)
        self._groups = Groups(optimizer, model)
        self._state = State(self)
        self.parts = Parts(self)
        # Set by a resume that has to wait for the first batch, which spreads the model.
        self.after_spreading: Callable[[], None] | None = None
        self._passes = Passes(self)
        self._meter = MemoryMeter(model, optimizer, self.device)
        self._spread: Spread | None = None
        # Where replicas train alone between meetings.
        self.rounds: Rounds | None = None
        # The way that gradients go, where it is not DDP's or FSDP's own.
        self.wiring: Wiring | None = None
        self.reducing = Reducing(self)
        if not needs_sample(self.layout, self.options):
            self._spread_out()
        # As torch's schedulers do: an optimizer that was scheduled before keeps its full rate.
        self._base_lrs = [g.setdefault("initial_lr", g["lr"]) for g in self.optimizer.param_groups]

    def _spread_out(self, batch: Any = None) -> None:
        """Put the model on its layout; ``batch`` is the first one, where the layout needs it."""
        sample = None
        if batch is not None:
            part = self._sample(batch)
            sample = functools.partial(self._run_sample, part)
        if self.options.compress is not None:
            self.wiring = Wiring(self.options.compress, self.model, self.layout, self.world)
        self._spread = spread(
            self._local,
            self.model,
            self.layout,
            self.world,
            self.options,
            context=self._precision.forward,
            sample=sample,
            materialise=self._materialise if self._on_meta else None,
            averaging=self.wiring,
        )
        self._on_meta = False
        if self.wiring is not None:
            self.wiring.know(self.spread.held, self.spread.tied)
        self._precision.device_types = sorted({device.type for device in self.spread.devices})
        self._local.moves_target = self._is_mapped
        if not self.spread.is_plain:
            mark_as_spread(self.model, self.layout)
            self._groups.repoint(self.optimizer, self.spread.held)
            self._parameters = [p for own in self.spread.held.values() for p in own]
            self._trainable = [p.requires_grad for p in self._parameters]
        if self.options["initial_weights"] == "own":
            check_copies_are_equal(self.spread.held, self.model, self.world)
        if self.options.sharding.offload == "optimizer":
            offload_state(self.optimizer)
        if self.layout.tp > 1:
            peers.share_random_stream(self.layout, self.world)
        group = self.spread.data_group
        self._has_sync_norm = group.size > 1 and sync_batchnorm.join(self.model, group)
        if self.options.local_steps is not None:
            self.rounds = Rounds(self.options.local_steps, self)
        if self.after_spreading is not None:
            self.after_spreading()
            self.after_spreading = None

    def _materialise(self, root: nn.Module) -> None:
        """Give the model, or a stage of it, its values: those of rank 0 on every layout."""
        init = self.options["init"] or getattr(self.model, "_init_weights", None)
        initial_weights = self.options["initial_weights"]
        make_values(root, self.layout, self.world, init, initial_weights=initial_weights)

    @property
    def spread(self) -> Spread:
        """The model on its layout; layouts with ``tp`` or ``pp`` have it from the first batch."""
        if self._spread is None:
            raise TrainingError(
                f"layout {str(self.layout)!r}: what each rank holds is found by the first batch. "
                "Run a step first."
            )
        return self._spread

    def _sample(self, batch: Any) -> Any:
        """A microbatch like those to come, where the model's parameters are."""
        part = self._passes.cut(batch)[0] if self._local.samples(batch) else placeholder(batch)
        # Placing by a device map starts from where the model is, and meta models run nowhere.
        first = next(self.model.parameters()).device
        device = first if self._is_mapped else torch.device("cpu") if self._on_meta else self.device
        return move(part, device, self._precision.batch_dtype)

    def _run_sample(self, part: Any) -> Term:
        with self._precision.forward():
            term: Term = self._local(part, 1)
        return term

    def step(self, batch: Any) -> StepResult:
        """One optimizer step over the global batch of which ``batch`` is this rank's share.

        Every rank must call it. The share may hold fewer samples than another rank's, or none.
        """
        started = time.perf_counter()
        pulse = self._pulse
        pulse.enter("forward")
        self._same_batches.check(batch)
        if self._spread is None:
            self._spread_out(batch)
        if self.clock is not None:
            self._meet()
        self._groups.follow(self.optimizer, self.spread.held, self.model)
        self._follow_freezing()
        for parameter in self._parameters:
            parameter.grad = None  # what a step that failed, or another backward, left there
        if self.rounds is not None and self.rounds.start_step():
            return step_alone(self, self.rounds, batch, started)
        self.reducing.begin_step()
        if self.wiring is not None:
            self.wiring.forget()
        self._sync_buffers()
        saved_buffers = self._copy_buffers() if self.options["nonfinite"] == "skip" else {}
        parts = self._passes.parts(batch)
        lr = self._set_lr()
        try:
            sums = self._passes.accumulate(parts, self._local.samples(batch))
        except BaseException:
            self.spread.reset()
            raise
        pulse.enter("optimizer")
        norm = self._finish_gradients(sums)
        numbers = Numbers(sums.world, norm)
        unread, self._unread = self._unread, None
        problem = None
        if self._look_later:
            self._unread = _Unread(self.steps_done + 1, numbers, sums)
        elif self.options["nonfinite"] != "ignore":
            problem = self._problem(numbers, sums, parts)
        if problem is None or problem.overflow:
            applied = self._update()
        else:
            applied = self._leave_alone(saved_buffers)
        if self.wiring is not None:
            self.wiring.settle(applied=applied, trained=self._trained())
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        schedule = self.options["schedule"]
        if isinstance(schedule, LRScheduler):
            schedule.step()
        if unread is not None:
            self._look_at(unread)
        self.reducing.end_step()
        pulse.finish_step(self.steps_done)
        pulse.enter("data")  # what comes between steps: a trainer tells more of it
        return StepResult(
            step=self.steps_done,
            lr=lr,
            seconds=time.perf_counter() - started,
            _problem=problem,
            _numbers=numbers,
        )

    def _meet(self) -> None:
        """Wait for ranks that come late to a step whose time is split up.

        Tensor-parallel ranks would wait inside the forward pass, where it looks like work; with
        other layouts they meet before, or after it, anyway.
        """
        if self.layout.tp > 1 and self.layout.pp == 1:
            with self._pulse.during("waiting"):
                dist.all_reduce(torch.zeros(1), group=self.world.everyone.cpu_group)

    def _follow_freezing(self) -> None:
        """Let the layout see that parameters were frozen or unfrozen since the last step."""
        trainable = [p.requires_grad for p in self._parameters]
        if trainable == self._trainable:
            return
        self._trainable = trainable
        self.spread.follow_freezing()
        if self.rounds is not None:
            self.rounds.follow_freezing()

    def _sync_buffers(self) -> None:
        group = self.spread.data_group
        if group.size > 1:
            with self._pulse.during("waiting"):
                sync_buffers(self.model, group)

    def _finish_gradients(self, sums: Sums) -> Tensor | None:
        """Turn the accumulated gradients into the gradient of the mean, clip it, give its norm."""
        with contextlib.nullcontext() if self.spread.is_plain else self._pulse.during("waiting"):
            self.spread.finish_gradients()
        if self._precision.scaler is not None:
            self._precision.scaler.unscale_(self.optimizer)
        counts = None if self.spread.is_plain else self.spread.counts_in_norm
        gradients = Gradients(self.optimizer, counts, self.device)
        if self.options["microbatch"] is not None or self.layout.pp > 1:
            factor = sums.divisor / sums.world[1]
            if self.device.type != "cpu" or factor != 1:  # on a GPU, looking would be waiting
                gradients.scale(factor)
        if self.observer is not None:
            self.observer(self)
        clip_norm, clip_value = self.options["clip_norm"], self.options["clip_value"]
        norm = None
        if clip_norm is not None or self.options["nonfinite"] != "ignore":
            norm = gradients.norm()
        if clip_norm is not None:
            assert norm is not None
            gradients.clip_norm(clip_norm, norm)
        if clip_value is not None:
            gradients.clip_values(clip_value)
        return norm

    @property
    def _look_later(self) -> bool:
        """Whether the verdict on a step is read a step later, to keep the GPU from running dry.

        Only where nothing depends on it in between: a run that stops anyway, without a scaler,
        whose own look at the gradients makes the host wait already.
        """
        return (
            self.device.type != "cpu"
            and self.options["nonfinite"] == "stop"
            and self._precision.scaler is None
        )

    def take_notes(self) -> list[str]:
        """What there is to tell the user since this was last asked, such as what was chosen."""
        tellers = (self.parts.local, self.parts.wire, self.reducing)
        notes, self._notes = self._notes, []
        for teller in tellers:
            notes += teller.notes
            teller.notes = []
        return notes

    def settle(self) -> None:
        """Wait for the last step and raise if it was not finite.

        On a GPU ``step`` looks at each step's loss and gradient while the next one runs. Call this
        after the last step, or before using the parameters; :meth:`state_dict` does. In a round of
        local steps it waits until all replicas are through with the step; every rank must call it.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            self._look_at(unread)
        if self.rounds is not None:
            self.rounds.settle()

    def traffic(self) -> Traffic | None:
        """The bytes of gradients that this rank has sent; ``None`` where they are not counted."""
        return traffic(self)

    @property
    def in_round(self) -> bool:
        """Whether replicas train alone and have not met at the end of the last step."""
        return self.rounds is not None and not self.rounds.together

    def meet(self) -> bool:
        """Let replicas that train alone meet now, so that all have one model; whether they did.

        Every rank must call it. To be called after the last step; the trainer does.
        """
        return self.rounds is not None and self.rounds.meet()

    def _look_at(self, unread: _Unread) -> None:
        if unread.numbers.finite:
            return
        problem = nonfinite.locate(None, [], self._precision, unread.sums.local, self.world)
        raise problem.error(unread.step, updated=True)

    def _problem(
        self, numbers: Numbers, sums: Sums, parts: list[tuple[Any, int]]
    ) -> Problem | None:
        """What is not finite in this step, if anything; raises where the policy is to stop."""
        if numbers.finite:
            return None
        if math.isfinite(numbers.loss) and self._precision.scaler is not None:
            return Problem(what="gradients", overflow=True, detail="fp16 gradients overflowed")
        # Where a forward is a collective, ranks cannot look alone.
        alone = self.spread.is_plain and not self._has_sync_norm
        module = self._local if alone else None
        problem = nonfinite.locate(module, parts, self._precision, sums.local, self.world)
        if self.options["nonfinite"] == "stop":
            self.optimizer.zero_grad(set_to_none=True)
            raise problem.error(self.steps_done + 1)
        return problem

    def _update(self) -> bool:
        """Change the parameters; whether that was done."""
        scaler = self._precision.scaler
        if scaler is None:
            self.optimizer.step()
            return True
        before = scaler.get_scale() if self.wiring is not None else 0.0
        scaler.step(self.optimizer)  # does nothing where the gradients overflowed
        scaler.update()
        # As torch documents it: the scale goes down if and only if the step was left out.
        return self.wiring is None or scaler.get_scale() >= before

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, own in self.spread.held.items():
            for parameter in own:
                if parameter.requires_grad:
                    yield name, parameter

    def _leave_alone(self, saved_buffers: Mapping[str, Tensor]) -> bool:
        """Undo what the forward of a skipped step left behind; the parameters are unchanged."""
        if self._precision.scaler is not None:
            self._precision.scaler.update()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(saved_buffers[name])
        return False

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _set_lr(self) -> float:
        schedule = self.options["schedule"]
        if schedule is not None and not isinstance(schedule, LRScheduler):
            factor = schedule(self.steps_done)
            if not isinstance(factor, int | float):
                raise TrainingError(
                    f"the schedule gave {factor!r} at step {self.steps_done}: it must return a "
                    "number, the factor on the learning rate."
                )
            for group in self.optimizer.param_groups[len(self._base_lrs) :]:  # added since
                self._base_lrs.append(group.setdefault("initial_lr", group["lr"]))
            for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def _shared(self) -> contextlib.AbstractContextManager[None]:
        """The model as of the last meeting, where replicas train alone; else as it is."""
        return contextlib.nullcontext() if self.rounds is None else self.rounds.shared_in()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, with equal buffers on all ranks; put back afterwards."""
        self.settle()
        begun = self.rounds is not None and self.rounds.begun
        if self._spread is not None and not begun:
            self._sync_buffers()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self._pulse.pause()
        try:
            with self._shared(), torch.no_grad(), self._pulse.during("evaluation"):
                yield
        finally:
            for module, training in modes:
                module.training = training
            if self._spread is not None:
                self._spread.let_go()

    def evaluate(self, batch: Any) -> list[Evaluated]:
        """This rank's share of an evaluation batch through the model, microbatch by microbatch.

        To be called inside :meth:`evaluating`, by every rank. Of the ranks that share samples, one
        gets the results, and the others none.
        """
        self._pulse.beat()
        self._same_batches.check(batch)
        if self._spread is None:
            self._spread_out(batch)
        with torch.no_grad():
            return self._passes.evaluate(batch)

    def measuring_memory(self) -> contextlib.AbstractContextManager[None]:
        """Measure the steps inside it for :meth:`memory`; on a CPU such a step is a slow one."""
        return self._meter.step()

    def memory(self) -> list[Memory]:
        """What each rank holds, in bytes, by rank: parameters, gradients, optimizer state, ….

        Activations and the peak are known of a step under :meth:`measuring_memory`. Every rank
        must call it.
        """
        return collectives.all_gather_object(self._meter.memory())

    def state_dict(self) -> dict[str, Any]:
        """Everything a later engine needs to go on: model, optimizer, scaler, schedule, step.

        It is that of the whole model, whatever the layout: every rank must call it, and any other
        layout can load it.
        """
        self.settle()
        with self._shared():
            return self._state.save()

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the model, whole, on the CPU, whichever ranks hold its parts.

        A collective, as are :meth:`whole_gradients` and :meth:`whole_buffers`.
        """
        return self._state.parameters()

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradient of every trained parameter; to be called by an ``observer``."""
        return self._state.gradients()

    def whole_buffers(self) -> dict[str, Tensor]:
        """Every buffer of the model."""
        return self._state.buffers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; refused where it is that of another model."""
        self._state.load(state)
        if self.rounds is not None:
            self.rounds.forget()


class _Unread(NamedTuple):
    """The verdict on a step that nobody has looked at yet."""

    step: int
    numbers: Numbers
    sums: Sums
