"""The engine: a model, its loss and its optimizer on a layout. Its one verb is ``step``.

The step itself is :func:`paceline.engine.step.run_step`; ``build.py`` puts the parts together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.engine.arguments import check_arguments
from paceline.engine.build import build
from paceline.engine.checks import check_model_and_options, rules_on_frozen
from paceline.engine.evaluation import Evaluated, evaluate_batch, evaluation_mode
from paceline.engine.initial_weights import check_initial_weights, check_not_spread
from paceline.engine.internals import HasInternals
from paceline.engine.loss import LossFunction
from paceline.engine.memory import Memory
from paceline.engine.options import (
    DEFAULTS,
    EngineOptions,
    OptimizerFactory,
    check_option_names,
)
from paceline.engine.rank_state import RankStates
from paceline.engine.result import StepResult
from paceline.engine.step import run_step
from paceline.layout import Layout
from paceline.parallel.spread import Spread
from paceline.sync.traffic import Traffic
from paceline.world import World, collectives


class Engine(HasInternals):
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
        sharding, tensor, pipeline: how ``zero``, ``tp`` and ``pp`` are done, where not by default:
            :class:`paceline.Sharding`, :class:`paceline.TensorParallel`,
            :class:`paceline.Pipelining`.
        checkpoint_activations: recompute activations in the backward pass: ``"full"``, a number n
            (every n-th block), ``"selective"``, or a :class:`paceline.Recompute`.
        device_map, max_memory: put the model's parts on several devices of this one process, by
            name or ``"auto"``, within these bounds.
        compress: the form in which gradients travel between data-parallel ranks, such as ``"int8"``
            or ``"topk:0.01"``, or a :class:`paceline.Compression`.
        local_steps: let data-parallel ranks train alone for so many steps and then meet, or a
            :class:`paceline.LocalSteps`.
        reduction: how gradients are summed over the ranks, where not by default: a
            :class:`paceline.Reduction`.
        init: called with each module of a model from the meta device, to give it values.
        initial_weights: ``"rank0"``: all ranks start from the parameters and buffers that rank 0
            has built; ``"own"``: every rank keeps what it has built, and nothing is sent.
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
        check_arguments(model, loss, optimizer, self.options, world)
        check_model_and_options(model, self.options)
        check_initial_weights(self.options["initial_weights"])
        check_not_spread(model)
        notes = rules_on_frozen(model, self.options["compress"])
        self.world = world if world is not None else World.current()
        self.layout = Layout.parse(self.options["layout"], world_size=self.world.size)
        self.layout.check_world(self.world.size)
        self.place = self.layout.place(self.world.rank)
        self.device = self.world.device
        self.parameter_count = sum(p.numel() for p in model.parameters())
        parts = build(model, loss, optimizer, self.options, self.layout, self.world)
        self._internals, self._context, self._sync = parts, parts.context, parts.sync
        self._notes = notes + parts.notes
        self.model = parts.replica.model
        self.optimizer = parts.context.optimizer

    # ------------------------------------------------------------------ training

    def step(self, batch: Any) -> StepResult:
        """One optimizer step over the global batch of which ``batch`` is this rank's share.

        Every rank must call it. The share may hold fewer samples than another rank's, or none.
        """
        return run_step(self._context, batch)

    @property
    def steps_done(self) -> int:
        """How many steps the model was trained for, those before a resume included."""
        return self._context.replica.steps_done

    @property
    def spread(self) -> Spread:
        """The model on its layout; layouts with ``tp`` or ``pp`` have it from the first batch."""
        return self._context.replica.spread

    @property
    def rank_state(self) -> RankStates:
        """The state as each rank holds it; :class:`paceline.Checkpoints` saves and restores it."""
        return self._internals.rank_state

    def settle(self) -> None:
        """Wait for the last step and raise if it was not finite.

        On a GPU ``step`` looks at each step's loss and gradient while the next one runs. Call this
        after the last step, or before using the parameters; :meth:`state_dict` does. In a round of
        local steps it waits until all replicas are through with the step; every rank must call it.
        """
        self._context.nonfinite.settle()
        self._sync.settle()

    @property
    def in_round(self) -> bool:
        """Whether replicas train alone and have not met at the end of the last step."""
        return not self._sync.is_synchronised

    def meet(self) -> bool:
        """Let replicas that train alone meet now, so that all have one model; whether they did.

        Every rank must call it. To be called after the last step; the trainer does.
        """
        return self._sync.synchronise()

    # ------------------------------------------------------------------ evaluation

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, with equal buffers on all ranks; put back afterwards."""
        self.settle()
        with evaluation_mode(self._context):
            yield

    def evaluate(self, batch: Any) -> list[Evaluated]:
        """This rank's share of an evaluation batch through the model, microbatch by microbatch.

        To be called inside :meth:`evaluating`, by every rank. Of the ranks that share samples, one
        gets the results, and the others none.
        """
        return evaluate_batch(self._context, batch)

    # ------------------------------------------------------------------ what it says of itself

    def take_notes(self) -> list[str]:
        """What there is to tell the user since this was last asked, such as what was chosen."""
        notes, self._notes = self._notes, []
        return notes + self._sync.take_notes()

    def traffic(self) -> Traffic | None:
        """The bytes of gradients that this rank has sent; ``None`` where they are not counted."""
        return self._sync.traffic()

    def measuring_memory(self) -> contextlib.AbstractContextManager[None]:
        """Measure the steps inside it for :meth:`memory`; on a CPU such a step is a slow one."""
        return self._internals.meter.step()

    def memory(self) -> list[Memory]:
        """What each rank holds, in bytes, by rank: parameters, gradients, optimizer state, ….

        Activations and the peak are known of a step under :meth:`measuring_memory`. Every rank
        must call it.
        """
        return collectives.all_gather_object(self._internals.meter.memory())

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
        """Take over what :meth:`state_dict` gave; refused where it is that of another model."""
        self._internals.state.load(state)

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the model, whole, on the CPU, whichever ranks hold its parts.

        A collective, as are :meth:`whole_gradients` and :meth:`whole_buffers`.
        """
        return self._internals.state.parameters()

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradient of every trained parameter, as long as there are gradients."""
        return self._internals.state.gradients()

    def whole_buffers(self) -> dict[str, Tensor]:
        """Every buffer of the model."""
        return self._internals.state.buffers()
