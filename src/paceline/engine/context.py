"""Everything that an optimizer step works with, as one explicit object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from paceline.engine.ema import AveragedWeights
from paceline.engine.freezing import Freezing
from paceline.engine.learning_rate import LearningRate
from paceline.engine.loss import LossModule
from paceline.engine.loss_scale import AgreedScaler
from paceline.engine.microbatches import Microbatches
from paceline.engine.model_setup import ModelSetup
from paceline.engine.nonfinite import NonFiniteCheck
from paceline.engine.optimizer_groups import Groups
from paceline.engine.precision import Precision
from paceline.engine.same_batches import SameBatches
from paceline.engine.step_timing import StepClock
from paceline.errors import TrainingError
from paceline.sync.protocol import Sync
from paceline.sync.replica import Replica


@dataclass
class StepContext:
    """What one engine's steps have in common; see ``paceline.engine.step.run_step``."""

    replica: Replica
    """The model on its layout, and how many steps it has done."""
    setup: ModelSetup
    """Puts the model on its layout, at the first batch where it needs to see one."""
    freezing: Freezing
    """Which parameters are trained at which step."""
    loss: LossModule
    precision: Precision
    optimizer: Optimizer
    groups: Groups
    """The names of the parameters in the optimizer's groups."""
    learning_rate: LearningRate
    microbatches: Microbatches
    same_batches: SameBatches
    sync: Sync
    """How replicas agree."""
    nonfinite: NonFiniteCheck
    average: AveragedWeights | None = None
    """The moving average of the weights, where one is kept."""
    clip_norm: float | None = None
    clip_value: float | None = None
    observer: Callable[[], None] | None = None
    """Called each step with the finished gradients in place, before clipping and the update."""
    is_evaluating: bool = False
    """Whether the model is in evaluation mode, by ``paceline.Engine.evaluating``."""
    clock: StepClock | None = None
    """Set by whoever wants to know where the time of the next steps goes; see step_timing.py."""

    @property
    def scaler(self) -> torch.amp.GradScaler | AgreedScaler | None:
        """That of fp16."""
        return self.precision.scaler

    def kept_average(self) -> AveragedWeights:
        """The average of the weights; raises where none is kept."""
        if self.average is None:
            raise TrainingError(
                "weights='ema': this engine keeps no average of its weights. Pass ema=0.999 to the "
                "Engine or Trainer, or take a checkpoint's: load_weights(…, weights='ema')."
            )
        return self.average
