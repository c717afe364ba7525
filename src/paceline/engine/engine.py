"""The engine: a model, its loss and its optimizer on a layout. Its one verb is ``step``.

The step itself is ``paceline.engine.step.run_step``; ``build.py`` puts the parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.make_loader import loader
from paceline.deprecation import warn_of_old_name
from paceline.engine.arguments import LRSchedule, OptimizerFactory, check_arguments
from paceline.engine.build import NoOptimizer, build
from paceline.engine.checks import check_model_and_options, rules_on_frozen
from paceline.engine.freezing import Freezing
from paceline.engine.inference import InferenceEngine
from paceline.engine.initial_weights import check_not_spread
from paceline.engine.learning_rate import say_what_it_counts
from paceline.engine.loss import LossFunction
from paceline.engine.rank_state import RankStates
from paceline.engine.reporting import ReportingEngine
from paceline.engine.result import StepResult
from paceline.engine.step import run_step
from paceline.errors import TrainingError
from paceline.layout import Coordinate, Layout
from paceline.options import (
    EMA,
    Compression,
    EngineOptions,
    LocalSteps,
    LossScaling,
    Pipelining,
    Recompute,
    Reduction,
    Sharding,
    TensorParallel,
)
from paceline.options.arguments import refuse_unknown
from paceline.options.ema import Weights, check_weights
from paceline.options.engine import InitialWeights, Nonfinite, Randomness
from paceline.options.engine import Precision as PrecisionName
from paceline.options.habits.attributes import missing_attribute
from paceline.options.rules import layout_in_world
from paceline.parallel.device_map import DeviceLike
from paceline.parallel.distributed_model import DistributedModel
from paceline.world import World, collectives


class Engine(InferenceEngine, ReportingEngine):
    """Trains ``model`` one global batch at a time, on any layout.

    Args:
        model: the model; it is spread over the ranks in place.
        optimizer: an optimizer over the model's parameters, or a function that makes one from them.
            An engine without one evaluates and predicts, and does not train.
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
        loss_scaling: How fp16 scales its losses.
        clip_norm: Clip the norm of the whole gradient to this. None: no clipping.
        clip_value: Clip each element of the gradient to this. None: no clipping.
        schedule: A function from the step (0, 1, …) to a factor on each group's learning rate;
            or one of torch's schedulers with what it counts, such as
            paceline.schedules.every('epoch', StepLR, step_size=30).
        compile: Compile the model with torch.compile.
        nonfinite: On NaN or Inf in the loss or the gradient: stop the run (on a GPU one step
            later), skip the step, or ignore it.
        sync_batchnorm: Batch-norm statistics over all ranks' samples instead of each rank's
            own.
        freeze: Parameters that are not trained, by patterns of their names, such as
            ['embeddings.*'].
        unfreeze_at: Parameters that are trained after so many steps, and frozen before: from
            patterns of their names to numbers of steps, such as {'embeddings.*': 1000}.
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
        compress: The format in which data-parallel ranks send each other gradients, such as
            int8.
        local_steps: Data-parallel ranks train alone for this many steps and then synchronise.
        reduction: How gradients are summed over the ranks.
        ema: Keep an exponential moving average of the trained weights, to evaluate and export: its
            decay, such as 0.999. None: no average.
        initial_weights: What ranks start from: rank0, the model that rank 0 has built, or own,
            what each has built.
        randomness: Where the random numbers of a forward pass (dropout and the like) come from.
            layout-free: from the seed, the step, the sample, the module and the place in the
            tensor, so that they are the same on every layout; a draw that belongs to no sample
            comes from each rank's own stream, and is named. strict: such a draw is refused.
            fast: all from each rank's own stream, with torch's own kernels.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | OptimizerFactory | None = None,
        loss: LossFunction | None = None,
        world: World | None = None,
        layout: str | Layout = "auto",
        microbatch: int | None = None,
        precision: PrecisionName = "fp32",
        loss_scaling: LossScaling | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        schedule: LRSchedule | None = None,
        compile: bool = False,
        nonfinite: Nonfinite = "stop",
        sync_batchnorm: bool = False,
        freeze: str | Sequence[str] | None = None,
        unfreeze_at: Mapping[str, int] | None = None,
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
        ema: EMA | float | None = None,
        initial_weights: InitialWeights = "rank0",
        randomness: Randomness = "layout-free",
        **unknown: Never,
    ) -> None:
        refuse_unknown(Engine, unknown, beside=loader)
        check_arguments(model, loss, optimizer, world, may_only_predict=True)
        self.options = EngineOptions.of(
            layout=layout,
            microbatch=microbatch,
            precision=precision,
            loss_scaling=loss_scaling,
            clip_norm=clip_norm,
            clip_value=clip_value,
            schedule=schedule,
            compile=compile,
            nonfinite=nonfinite,
            sync_batchnorm=sync_batchnorm,
            freeze=freeze,
            unfreeze_at=unfreeze_at,
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
            ema=ema,
            initial_weights=initial_weights,
            randomness=randomness,
        )
        say_what_it_counts(schedule)
        check_not_spread(model)
        freezing = Freezing(model, self.options)
        freezing.begin()
        check_model_and_options(model, self.options)
        notes = rules_on_frozen(model, self.options.compress)
        self.world = world if world is not None else World.current()
        self.layout = layout_in_world(self.options, self.world.size)
        self.coordinate = self.layout.coordinate(self.world.rank)
        self.device = self.world.device
        self.parameter_count = sum(p.numel() for p in model.parameters())
        parts = build(model, loss, optimizer, self.options, self.layout, self.world, freezing)
        self._internals, self._context, self._sync = parts, parts.context, parts.sync
        self._notes = notes + parts.notes
        self.model = parts.replica.model
        self.optimizer = parts.context.optimizer

    # ------------------------------------------------------------------ training

    @property
    def place(self) -> Coordinate:
        """The old name of ``coordinate``."""
        warn_of_old_name("Engine.place", "coordinate")
        return self.coordinate

    def step(self, batch: Any) -> StepResult:
        """One optimizer step over the global batch of which ``batch`` is this rank's share.

        Every rank must call it. The share may hold fewer samples than another rank's, or none.
        """
        if isinstance(self.optimizer, NoOptimizer):
            raise TrainingError(
                "step: this engine was made without an optimizer, to evaluate and predict. Pass "
                "optimizer= to train, such as torch.optim.AdamW(model.parameters())."
            )
        return run_step(self._context, batch)

    def epoch_done(self) -> None:
        """Let a schedule that counts epochs go on. Call it after each; the trainer does."""
        self._context.learning_rate.epoch_done()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Let ``ReduceLROnPlateau`` see what an evaluation gave; the trainer does.

        Every rank calls it, and rank 0's metrics count.
        """
        rate = self._context.learning_rate
        if rate.goes_by_metric:
            rate.evaluated(collectives.broadcast_object(dict(metrics)))

    @property
    def steps_done(self) -> int:
        """How many steps the model was trained for, those before a resume included."""
        return self._context.replica.steps_done

    @property
    def spread(self) -> DistributedModel:
        """The model on its layout; layouts with ``tp`` or ``pp`` have it from the first batch."""
        return self._context.replica.spread

    @property
    def rank_state(self) -> RankStates:
        """The state as each rank holds it; ``paceline.Checkpoints`` saves and restores it."""
        return self._internals.rank_state

    @property
    def in_round(self) -> bool:
        """Whether replicas train alone and have not met at the end of the last step."""
        return not self._sync.is_synchronised

    def meet(self) -> bool:
        """Let replicas that train alone meet now, so that all have one model; whether they did.

        Every rank must call it. To be called after the last step; the trainer does.
        """
        return self._sync.synchronise()

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, "Engine", name)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything a later engine needs to go on: model, optimizer, scaler, schedule, step.

        It is that of the whole model, whatever the layout: every rank must call it, and any other
        layout can load it.
        """
        self.settle()
        with self._sync.shared_model():
            return self._internals.state.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; refused where it is that of another model."""
        self._internals.state.load(state)

    def whole_parameters(self, weights: Weights = "model") -> dict[str, Tensor]:
        """Every parameter of the model, whole, on the CPU, whichever ranks hold its parts.

        With ``weights="ema"`` their averages (``ema=``); one without an average is itself. A
        collective, as are ``whole_gradients`` and ``whole_buffers``.
        """
        check_weights(weights, "whole_parameters")
        state = self._internals.state
        return state.averaged_parameters() if weights == "ema" else state.parameters()

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradient of every trained parameter, as long as there are gradients."""
        return self._internals.state.gradients()

    def whole_buffers(self) -> dict[str, Tensor]:
        """Every buffer of the model."""
        return self._internals.state.buffers()
