"""Puts an engine's model on its layout, at once or at the first batch where it must see one."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.engine.batch import move, placeholder
from paceline.engine.ema import AveragedWeights
from paceline.engine.initial_weights import (
    check_copies_are_equal,
    make_values,
    mark_as_spread,
)
from paceline.engine.loss import LossModule
from paceline.engine.microbatches import Microbatches
from paceline.engine.optimizer_groups import Groups
from paceline.engine.precision import Precision
from paceline.engine.randomness import share_random_stream
from paceline.options import EngineOptions
from paceline.parallel import sync_batchnorm
from paceline.parallel.apply_layout import apply_layout, both, needs_sample
from paceline.parallel.loss_term import Term
from paceline.parallel.meta import is_on_meta
from paceline.parallel.offload import offload_state
from paceline.sync.replica import Replica
from paceline.sync.synchronous import SynchronousSGD


class ModelSetup:
    """Spreads one engine's model, and has its optimizer train what this rank holds of it."""

    def __init__(
        self,
        replica: Replica,
        options: EngineOptions,
        loss: LossModule,
        precision: Precision,
        optimizer: Optimizer,
        groups: Groups,
        microbatches: Microbatches,
        sync: SynchronousSGD,
        average: AveragedWeights | None = None,
    ) -> None:
        self._replica, self._options = replica, options
        self._loss, self._precision = loss, precision
        self._optimizer, self._groups = optimizer, groups
        self._microbatches, self._sync, self._average = microbatches, sync, average
        self.on_meta = is_on_meta(replica.model)
        """Whether parameters have no values, and no memory, yet."""

    @property
    def needs_batch(self) -> bool:
        """Whether what to split, or where to cut, is found by running the model."""
        return needs_sample(self._replica.layout, self._options)

    def apply_layout(self, batch: Any = None) -> None:
        """Spread the model; ``batch`` is the first one, where the layout needs it. A collective."""
        replica, precision, options = self._replica, self._precision, self._options
        layout, world = replica.layout, replica.world
        sample = None
        if batch is not None:
            sample = functools.partial(self._run_sample, self._sample(batch))
        found = apply_layout(
            self._loss,
            replica.model,
            layout,
            world,
            options,
            context=self._context,
            sample=sample,
            materialise=self._materialise if self.on_meta else None,
            averaging=self._sync.before_spreading(),
        )
        self.on_meta = False
        replica.take_spread(found)
        if found.pipeline is not None:
            found.pipeline.log_to(self._microbatches.logs)
        self._watch_draws()
        self._sync.after_spreading()
        precision.device_types = sorted({device.type for device in found.devices})
        self._loss.moves_target = options.device_map is not None
        if not found.is_plain:
            mark_as_spread(replica.model, layout)
            self._groups.repoint(self._optimizer, found.held)
        if self._average is not None:
            self._average.spread(found.held)
        if self._options.initial_weights == "own":
            check_copies_are_equal(found.held, replica.model, world)
        if options.sharding.offload == "optimizer":
            offload_state(self._optimizer)
        if layout.tp > 1:
            share_random_stream(layout, world)
        group = found.data_group
        replica.has_sync_norm = group.size > 1 and sync_batchnorm.join(replica.model, group)
        if replica.after_spreading is not None:
            replica.after_spreading()
            replica.after_spreading = None

    def _context(self) -> contextlib.AbstractContextManager[None]:
        """What every forward pass runs in, and every recomputation."""
        randomness = self._replica.randomness
        if randomness is None or randomness.off:
            return self._precision.forward()
        return both(randomness.forward, self._precision.forward)()

    def _watch_draws(self) -> None:
        """Have the modules on this rank say when they run, under their names in the model."""
        replica = self._replica
        if replica.randomness is None or replica.randomness.off:
            return
        pipeline = replica.spread.pipeline
        stages = [] if pipeline is None else pipeline.stages
        compiled = self._options.compile
        replica.randomness.watch(replica.model, stages, replica.device, compiled=compiled)
        if pipeline is not None:
            pipeline.follow_draws(replica.randomness)

    def _materialise(self, root: nn.Module) -> None:
        """Give the model, or a stage of it, its values: those of rank 0 on every layout."""
        replica = self._replica
        init = self._options.init or getattr(replica.model, "_init_weights", None)
        make_values(
            root, replica.layout, replica.world, init, initial_weights=self._options.initial_weights
        )

    def _sample(self, batch: Any) -> Any:
        """A microbatch like those to come, where the model's parameters are."""
        replica = self._replica
        has_samples = self._loss.samples(batch)
        part = self._microbatches.cut(batch)[0] if has_samples else placeholder(batch)
        device = replica.device
        # Placing by a device map starts from where the model is, and meta models run nowhere.
        if self._options.device_map is not None:
            device = next(replica.model.parameters()).device
        elif self.on_meta:
            device = torch.device("cpu")
        return move(part, device, self._precision.batch_dtype)

    def _run_sample(self, part: Any) -> Term:
        with self._precision.forward():
            term: Term = self._loss(part, 1)
        return term
