"""For people who keep their own loop, as they write it with Accelerate: its parts, spread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Never

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.engine.accelerator_parts import BatchSizeIs, PreparingAccelerator
from paceline.engine.accelerator_ranks import RanksAccelerator
from paceline.engine.accelerator_state import SavingAccelerator
from paceline.engine.gradients import Gradients
from paceline.engine.own_loop import WeightedGradient
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.options import EngineOptions, LossScaling, Sharding
from paceline.options.arguments import refuse_unknown
from paceline.options.engine import InitialWeights
from paceline.options.engine import Precision as PrecisionName
from paceline.options.habits.attributes import missing_attribute
from paceline.parallel.distributed_model import DistributedModel
from paceline.parallel.meta import Init


class Accelerator(PreparingAccelerator, RanksAccelerator, SavingAccelerator):
    """A loop of your own on any number of ranks: prepare its parts, and keep writing it.

        accelerator = paceline.Accelerator(precision="bf16", accumulate=4)
        model, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, loader, schedule
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    Args:
        precision: of the forward pass: ``fp32``; ``bf16`` or ``fp16`` by autocast, whose results
            leave the model in float32; ``fp64`` throughout.
        loss_scaling: the settings of fp16's gradient scaler.
        accumulate: batches that make one optimizer step; fewer at the end of an epoch.
        layout: data-parallel over all ranks (``auto``), or sharded, such as ``dp=4,zero=3``.
        sharding: how ``zero`` shards models.
        batch_size_is: what the batch size of a DataLoader is: ``global``, the samples of a batch
            over all ranks, or ``per_device``, those of each rank. Left out it is global, and a
            line says so.
        seed: orders the samples of DataLoaders that shuffle.
        initial_weights: what ranks start from: the models of rank 0, or each its ``own``.
        init: gives values to models from the meta device.
    """

    def __init__(
        self,
        *,
        precision: PrecisionName = "fp32",
        loss_scaling: LossScaling | None = None,
        accumulate: int = 1,
        layout: str | Layout = "auto",
        sharding: Sharding | None = None,
        batch_size_is: BatchSizeIs | None = None,
        seed: int = 0,
        initial_weights: InitialWeights = "rank0",
        init: Init | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(Accelerator, unknown)
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise TrainingError(f"accumulate={accumulate!r} must be a whole number, 1 or more.")
        if batch_size_is not in (None, "global", "per_device"):
            raise TrainingError(
                f"batch_size_is={batch_size_is!r} must be 'global' (the samples of a batch over "
                "all ranks) or 'per_device' (those of each rank)."
            )
        options = EngineOptions.of(
            layout=layout,
            sharding=sharding,
            precision=precision,
            loss_scaling=loss_scaling,
            initial_weights=initial_weights,
            init=init,
        )
        super().__init__(options, accumulate=accumulate, batch_size_is=batch_size_is, seed=seed)

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch at hand ends an optimizer step."""
        return self._loop.accumulation.ends_step

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around the forward, backward and step of a batch: ranks talk in the last of a step alone.

        ``models``: those that the block trains; all that were prepared, if none is named.
        """
        if self._active is None:
            self._loop.by_hand.begin_pass()
        with contextlib.nullcontext() if self.sync_gradients else self.no_sync(*models):
            yield

    @contextlib.contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """Backwards in it add to each rank's own gradients, and send nothing. On one rank, too."""
        with contextlib.ExitStack() as stack:
            for model in models or [made.called for made in self._models]:
                stack.enter_context(self._spread_of(model).called.no_sync())  # type: ignore[operator]
            yield

    def backward(
        self, loss: Tensor, *, count: float | Tensor | None = None, **options: Any
    ) -> None:
        """``loss.backward()``, weighed so that a step has the gradient of its mean loss.

        The loss is a mean over this rank's samples of the batch, or over ``count`` items (tokens
        that are not padding, say). Do not divide it by the number of batches of a step.
        """
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise TrainingError(
                f"accelerator.backward({type(loss).__name__}): it takes a loss tensor that has a "
                "gradient: not loss.item(), not a loss from torch.no_grad(), not the model's whole "
                "output (outputs.loss instead)."
            )
        accumulation = self._loop.accumulation
        items = None if count is None else float(count)
        self._loop.begin_backward([made.sharded for made in self._models if made.sharded])
        weight = accumulation.weight(items) * self._loop.factor_before
        if self._loop.scaler is not None:
            loss = self._loop.scaler.scale(loss)
        if weight != 1:
            loss = WeightedGradient.apply(loss, weight)
        loss.backward(**options)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float
    ) -> Tensor | None:
        """Clip the norm of the gradients of ``parameters``, whatever the layout and precision.

        Returns the norm before; ``None`` before the last batch of a step, when there is nothing
        to clip yet.
        """
        own = self._finished(parameters)
        if own is None:
            return None
        gradients = Gradients(own, self._counts(), self.world.device)
        norm = gradients.norm()
        gradients.clip_norm(max_norm, norm)
        return norm

    def clip_grad_value_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, clip_value: float
    ) -> None:
        """Bound each element of the gradients of ``parameters``."""
        if (own := self._finished(parameters)) is not None:
            Gradients(own, None, self.world.device).clip_values(clip_value)

    def _finished(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter
    ) -> list[nn.Parameter] | None:
        if not self.sync_gradients:
            return None
        own = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        wanted = {id(parameter) for parameter in own}
        for control in self._controls:
            if wanted & {id(parameter) for parameter in control.parameters}:
                control.finish()
        return own

    def _counts(self) -> Any:
        """Who counts in a norm; ``None`` where every rank has the whole gradient."""
        if not self.layout.zero:
            return None
        model = self._models[0].model
        return DistributedModel(model, model, self.layout, self.world).counts_in_norm

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the forward pass, for a loss that is to be computed in it as well."""
        return self._precision.forward()

    def step_was_skipped(self, optimizer: Optimizer | None = None) -> bool:
        """Whether the last step of ``optimizer``, or of any, was left out for an overflow."""
        return any(
            control.was_skipped
            for control in self._controls
            if optimizer is None or control.optimizer is optimizer
        )

    @property
    def loss_scale(self) -> float | None:
        """What fp16 multiplies losses by now; ``None`` in other precisions."""
        self._loop.settle_scale()
        return None if self._loop.scaler is None else self._loop.scaler.get_scale()

    def __getattr__(self, name: str) -> Any:
        return missing_attribute(self, "Accelerator", name)
