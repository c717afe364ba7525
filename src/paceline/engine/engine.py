"""The engine: a model, its loss and its optimizer on a layout. Its one verb is ``step``."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.engine import nonfinite
from paceline.engine.batch import move, placeholder, split
from paceline.engine.checks import (
    check_depends_on_parameters,
    check_loss_parameters,
    check_model_and_options,
    check_optimizer,
    check_optimizer_state,
    check_schedule,
)
from paceline.engine.gradients import Gradients
from paceline.engine.loss import LossFunction, LossModule, Term
from paceline.engine.nonfinite import Problem
from paceline.engine.options import DEFAULTS, EngineOptions, OptimizerFactory, check_option_names
from paceline.engine.precision import Precision
from paceline.engine.result import Numbers, StepResult
from paceline.errors import CheckpointError
from paceline.layout import Layout
from paceline.parallel import sync_batchnorm
from paceline.parallel.compose import spread
from paceline.parallel.replicate import sync_buffers
from paceline.world import World


class Engine:
    """Trains ``model`` one global batch at a time, on any layout.

    ``loss`` is called as ``loss(output, target)`` and returns a mean over samples, or a pair
    ``(sum, count)``; leave it out for a model that returns its own loss. ``optimizer`` is an
    optimizer over the model's parameters, or a function that makes one from them.

    Options:
        layout: such as ``"dp=4"``; ``"auto"`` spreads the data over the whole world.
        microbatch: the most samples a rank puts through the model at once; a larger share is cut
            into near-equal parts whose gradients add up without communication in between.
        precision: ``fp32``, ``bf16`` and ``fp16`` (autocast; fp16 with a gradient scaler), or
            ``fp64``, which casts the model and keeps every cast inside it in float64.
        clip_norm, clip_value: bounds for the gradient's global norm, and for its elements.
        schedule: a function from the step (0, 1, …) to a factor on each group's learning rate,
            or one of torch's schedulers.
        compile: compile the model with ``torch.compile``.
        nonfinite: what to do about NaN or Inf in the loss or the gradient: ``stop`` (raise; on a
            GPU one step later, see :meth:`settle`), ``skip`` (leave the parameters alone and go
            on) or ``ignore``.
        sync_batchnorm: normalise over all ranks' samples instead of each rank's own.
        forward: ``forward(model, batch)`` returning the loss, for models that need more than
            being called with their batch.
        count: ``count(batch)`` tells over how many items the loss of a batch is a mean, where
            that is not the samples.
        world: the world to train in; by default the one this process was launched into.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | OptimizerFactory,
        loss: LossFunction | None = None,
        world: World | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_option_names(options)
        self.options = EngineOptions(**{**DEFAULTS, **options})
        check_model_and_options(model, self.options)
        self.world = world if world is not None else World.current()
        self.layout = Layout.parse(self.options["layout"], world_size=self.world.size)
        self.layout.check_world(self.world.size)
        self.device = self.world.device
        self.steps_done = 0
        # Called each step with the finished gradients in place, before clipping and the update.
        self.observer: Callable[[Engine], None] | None = None
        self._unread: _Unread | None = None
        self._precision = Precision(self.options["precision"], self.device)
        self._build(model, loss, optimizer)

    def _build(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        optimizer: Optimizer | OptimizerFactory,
    ) -> None:
        if self.options["sync_batchnorm"]:
            model = sync_batchnorm.convert(model)
        if self.options["compile"]:
            model.compile()
        self.model = model
        self._local = LossModule(model, loss, self.options["forward"], self.options["count"])
        check_loss_parameters(self._local)
        self._local.to(self.device)
        self._precision.prepare(self._local)
        self._parameters = list(model.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        if not isinstance(optimizer, Optimizer) and callable(optimizer):
            optimizer = optimizer([p for p in self._parameters if p.requires_grad])
        check_optimizer(optimizer, model)
        self.optimizer = optimizer
        check_schedule(self.options["schedule"], self.optimizer)
        self._spread = spread(self._local, self.layout, self.device)
        self._has_sync_norm = self.world.size > 1 and sync_batchnorm.set_contributes(model, True)
        # As torch's schedulers do: an optimizer that was scheduled before keeps its full rate.
        self._base_lrs = [g.setdefault("initial_lr", g["lr"]) for g in self.optimizer.param_groups]

    def step(self, batch: Any) -> StepResult:
        """One optimizer step over the global batch of which ``batch`` is this rank's share.

        Every rank must call it. The share may hold fewer samples than another rank's, or none.
        """
        started = time.perf_counter()
        self._follow_freezing()
        for parameter in self._parameters:
            parameter.grad = None  # what a step that failed, or another backward, left there
        if self.world.size > 1:
            sync_buffers(self.model)
        saved_buffers = self._copy_buffers() if self.options["nonfinite"] == "skip" else {}
        parts = self._parts(batch)
        lr = self._set_lr()
        sums = self._accumulate(parts, self._local.samples(batch))
        norm = self._finish_gradients(sums)
        numbers = Numbers(sums.world, norm)
        unread, self._unread = self._unread, None
        problem = None
        if self._look_later:
            self._unread = _Unread(self.steps_done + 1, numbers, sums)
        elif self.options["nonfinite"] != "ignore":
            problem = self._problem(numbers, sums, parts)
        if problem is None or problem.overflow:
            self._update()
        else:
            self._leave_alone(saved_buffers)
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        schedule = self.options["schedule"]
        if isinstance(schedule, LRScheduler):
            schedule.step()
        if unread is not None:
            self._look_at(unread)
        return StepResult(
            step=self.steps_done,
            lr=lr,
            seconds=time.perf_counter() - started,
            problem=problem,
            _numbers=numbers,
        )

    def _follow_freezing(self) -> None:
        """Spread anew after parameters were frozen or unfrozen: DDP averages those it was shown."""
        trainable = [p.requires_grad for p in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            del self._spread  # takes its hooks off the parameters before new ones are put on
            self._spread = spread(self._local, self.layout, self.device)

    def _parts(self, batch: Any) -> list[tuple[Any, int]]:
        """The share's microbatches, on the device, each with the items its loss averages over."""
        samples = self._local.samples(batch)
        cut = split(batch, self.options["microbatch"])
        items = [self._local.items(part) if samples else 0 for part in cut]
        if self._has_sync_norm:
            # Each forward is a collective: ranks with fewer microbatches fill up without items.
            most = torch.tensor(len(cut))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.world.everyone.cpu_group)
            missing = int(most) - len(cut)
            cut, items = cut + cut[:1] * missing, items + [0] * missing
        dtype = self._precision.batch_dtype
        return [(move(part, self.device, dtype), n) for part, n in zip(cut, items, strict=True)]

    def _accumulate(self, parts: list[tuple[Any, int]], samples: int) -> _Sums:
        """Forward and backward over all microbatches; gradients end up averaged over the ranks.

        The gradient of the mean needs the count of the whole global batch, which a loss that
        counts tokens tells only after the last forward. So each part is divided by the global
        count of the first microbatches, which keeps it in range for fp16, and
        :meth:`_finish_gradients` multiplies by what is missing: one, where nothing accumulates.
        """
        local = torch.zeros(3, dtype=torch.float64, device=self.device)
        local[2].fill_(samples)  # plain assignment would make the host wait for a GPU
        divisor = local[1]
        world, work = local, None
        for index, (part, items) in enumerate(parts):
            last = index == len(parts) - 1
            with self._reducing(last):
                term = self._forward(part, items)
                check_depends_on_parameters(term.total)
                local[0] += term.total.detach()
                local[1] += term.count
                if index == 0:
                    divisor = local[1].clone()
                    if self.world.size > 1:
                        dist.all_reduce(divisor)
                    divisor.masked_fill_(divisor == 0, 1)  # nothing but padding so far
                if last and self.world.size > 1:
                    world = local.clone()
                    work = dist.all_reduce(world, async_op=True)  # hidden behind the backward
                loss = term.total * (self.world.size / divisor).to(term.total.dtype)
                self._backward(loss, work)
        if work is not None:
            work.wait()
        return _Sums(local=local, world=world, divisor=divisor)

    def _backward(self, loss: Tensor, work: dist.Work | None) -> None:
        scaler = self._precision.scaler
        try:
            (loss if scaler is None else scaler.scale(loss)).backward()
        except BaseException:
            # A process group must not be destroyed around a collective that is under way: Gloo's
            # thread may wait for the interpreter lock while its destructor waits for the thread.
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait()
            raise

    def _reducing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Only the last backward of a step communicates."""
        if last or not isinstance(self._spread, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._spread.no_sync()

    def _forward(self, part: Any, items: int) -> Term:
        with self._precision.forward():
            if items or not self._has_sync_norm:
                return self._spread(part, items)
            # The other ranks' norms wait for this rank: show them a sample that does not count.
            sync_batchnorm.set_contributes(self.model, False)
            try:
                term: Term = self._spread(placeholder(part), 1)
            finally:
                sync_batchnorm.set_contributes(self.model, True)
            return Term(term.total * 0, 0, None)

    def _finish_gradients(self, sums: _Sums) -> Tensor | None:
        """Turn the accumulated gradients into the gradient of the mean, clip it, give its norm."""
        if self._precision.scaler is not None:
            self._precision.scaler.unscale_(self.optimizer)
        gradients = Gradients(self.optimizer)
        if self.options["microbatch"] is not None:
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

    def settle(self) -> None:
        """Wait for the last step and raise if it was not finite.

        On a GPU ``step`` looks at each step's loss and gradient while the next one runs. Call this
        after the last step, or before using the parameters; :meth:`state_dict` does.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            self._look_at(unread)

    def _look_at(self, unread: _Unread) -> None:
        if unread.numbers.finite:
            return
        problem = nonfinite.locate(None, [], self._precision, unread.sums.local, self.world)
        raise problem.error(unread.step, updated=True)

    def _problem(
        self, numbers: Numbers, sums: _Sums, parts: list[tuple[Any, int]]
    ) -> Problem | None:
        """What is not finite in this step, if anything; raises where the policy is to stop."""
        if numbers.finite:
            return None
        if math.isfinite(numbers.loss) and self._precision.scaler is not None:
            return Problem(what="gradients", overflow=True, detail="fp16 gradients overflowed")
        # A synchronised norm makes every forward a collective: then ranks cannot look alone.
        module = None if self._has_sync_norm else self._local
        problem = nonfinite.locate(module, parts, self._precision, sums.local, self.world)
        if self.options["nonfinite"] == "stop":
            self.optimizer.zero_grad(set_to_none=True)
            raise problem.error(self.steps_done + 1)
        return problem

    def _update(self) -> None:
        scaler = self._precision.scaler
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)  # does nothing where the gradients overflowed
            scaler.update()

    def _leave_alone(self, saved_buffers: Mapping[str, Tensor]) -> None:
        """Undo what the forward of a skipped step left behind."""
        if self._precision.scaler is not None:
            self._precision.scaler.update()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(saved_buffers[name])

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _set_lr(self) -> float:
        schedule = self.options["schedule"]
        if schedule is not None and not isinstance(schedule, LRScheduler):
            factor = schedule(self.steps_done)
            for group in self.optimizer.param_groups[len(self._base_lrs) :]:  # added since
                self._base_lrs.append(group.setdefault("initial_lr", group["lr"]))
            for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * factor
        return float(self.optimizer.param_groups[0]["lr"])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, with equal buffers on all ranks; put back afterwards."""
        self.settle()
        if self.world.size > 1:
            sync_buffers(self.model)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def evaluate(self, batch: Any) -> list[Evaluated]:
        """This rank's share of an evaluation batch through the model, microbatch by microbatch.

        To be called inside :meth:`evaluating`; nothing is exchanged between ranks.
        """
        results = []
        has_samples = self._local.samples(batch) > 0
        for part in split(batch, self.options["microbatch"]) if has_samples else ():
            on_device = move(part, self.device, self._precision.batch_dtype)
            items = self._local.items(part)
            with self._precision.forward():
                term: Term = self._local(on_device, items or 1)
            if not items:  # nothing but padding: metrics want the output, the loss is 0/0
                term = Term(torch.zeros(()), 0, term.output)
            results.append(Evaluated(on_device, self._local.samples(part), term))
        return results

    def state_dict(self) -> dict[str, Any]:
        """Everything a later engine needs to go on: model, optimizer, scaler, schedule, step."""
        self.settle()
        schedule, scaler = self.options["schedule"], self._precision.scaler
        return {
            "step": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": schedule.state_dict() if isinstance(schedule, LRScheduler) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; refused where it is that of another model."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(
                f"the saved state is that of another model. {error} Build the model as it was "
                "built then, or start a new run."
            ) from error
        check_optimizer_state(state["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(state["optimizer"])
        schedule, scaler = self.options["schedule"], self._precision.scaler
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        if isinstance(schedule, LRScheduler) and state["schedule"] is not None:
            schedule.load_state_dict(state["schedule"])
        self.steps_done = state["step"]


class _Sums(NamedTuple):
    """Loss sum, item count and sample count of a step: this rank's, and the world's."""

    local: Tensor
    world: Tensor
    divisor: Tensor  # what each part of the loss was divided by


class _Unread(NamedTuple):
    """The verdict on a step that nobody has looked at yet."""

    step: int
    numbers: Numbers
    sums: _Sums


class Evaluated(NamedTuple):
    """One evaluation microbatch: the batch on its device, its size, its loss and model output."""

    batch: Any
    samples: int
    term: Term
