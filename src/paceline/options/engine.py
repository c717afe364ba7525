"""The options of ``paceline.Engine``, which ``paceline.Trainer`` takes as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.options.arguments import documented
from paceline.options.compression import Compression
from paceline.options.declare import Option, check, shown
from paceline.options.ema import EMA
from paceline.options.local_steps import LocalSteps
from paceline.options.loss_scaling import LossScaling
from paceline.options.pipeline import Pipelining
from paceline.options.recompute import Recompute
from paceline.options.reduction import Reduction
from paceline.options.sharding import Sharding
from paceline.options.tensor import TensorParallel

InitialWeights = Literal["rank0", "own"]
Randomness = Literal["layout-free", "strict", "fast"]
Nonfinite = Literal["stop", "skip", "ignore"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]

_SECTIONS = ("sharding", "tensor", "pipeline", "reduction", "loss_scaling")
"""Options that are never None: what is left out has its own defaults."""
_NO_CLIPPING = "a number greater than 0, or None for no clipping"


@documented
@dataclass(frozen=True)
class EngineOptions:
    """How an engine trains, in full: ``of`` makes it from what a caller wrote.

    Types are given without torch, so that a config can be checked before torch is imported.
    """

    config_section: ClassVar[str] = ""

    layout: Annotated[
        str | Layout,
        Option(
            "How work is spread over the ranks, such as 'dp=2' or 'dp=2,zero=3,tp=2'; auto: "
            "data-parallel over all of them."
        ),
    ] = "auto"
    microbatch: Annotated[
        int | None,
        Option(
            "The most samples a rank puts through the model at once; a larger share of the batch "
            "is cut into near-equal parts whose gradients add up. None: the whole share at once.",
            key="batch.microbatch",
            ge=1,
            must="a whole number of samples, 1 or more",
        ),
    ] = None
    precision: Annotated[
        Precision,
        Option(
            "Number format of the forward and backward pass: fp32, bf16 or fp16 (autocast; fp16 "
            "with a gradient scaler), or fp64, in which the whole model computes.",
        ),
    ] = "fp32"
    loss_scaling: Annotated[LossScaling, Option("How fp16 scales its losses.")] = LossScaling()
    clip_norm: Annotated[
        float | None,
        Option(
            "Clip the norm of the whole gradient to this. None: no clipping.",
            key="train.clip_norm",
            gt=0,
            must=_NO_CLIPPING,
        ),
    ] = None
    clip_value: Annotated[
        float | None,
        Option(
            "Clip each element of the gradient to this. None: no clipping.",
            key="train.clip_value",
            gt=0,
            must=_NO_CLIPPING,
        ),
    ] = None
    schedule: Annotated[
        Any,
        Option(
            "A function from the step (0, 1, …) to a factor on each group's learning rate; or one "
            "of torch's schedulers with what it counts, such as "
            "paceline.schedules.every('epoch', StepLR, step_size=30).",
            key="",
        ),
    ] = None
    compile: Annotated[bool, Option("Compile the model with torch.compile.")] = False
    nonfinite: Annotated[
        Nonfinite,
        Option(
            "On NaN or Inf in the loss or the gradient: stop the run (on a GPU one step later), "
            "skip the step, or ignore it.",
            key="train.nonfinite",
        ),
    ] = "stop"
    sync_batchnorm: Annotated[
        bool,
        Option(
            "Batch-norm statistics over all ranks' samples instead of each rank's own.",
            key="train.sync_batchnorm",
        ),
    ] = False
    freeze: Annotated[
        str | Sequence[str] | None,
        Option(
            "Parameters that are not trained, by patterns of their names, such as "
            "['embeddings.*'].",
            key="train.freeze",
            must="a pattern of names of parameters, such as 'embeddings.*', or a list of them",
        ),
    ] = None
    unfreeze_at: Annotated[
        Mapping[str, int] | None,
        Option(
            "Parameters that are trained after so many steps, and frozen before: from patterns of "
            "their names to numbers of steps, such as {'embeddings.*': 1000}.",
            key="train.unfreeze_at",
            must="a dict from patterns of names of parameters to numbers of steps, 1 or more, such "
            "as {'embeddings.*': 1000}",
        ),
    ] = None
    forward: Annotated[
        Callable[[Any, Any], Any] | None,
        Option(
            "Called as forward(model, batch), it returns the loss: for models that need more than "
            "being called with their batch.",
            key="",
            must="a function, called as forward(model, batch)",
        ),
    ] = None
    count: Annotated[
        Callable[[Any], Any] | None,
        Option(
            "Called as count(batch), it says over how many items the loss of a batch is a mean, "
            "where that is not the samples.",
            key="",
            must="a function, called as count(batch)",
        ),
    ] = None
    sharding: Annotated[Sharding, Option("How zero shards the model.")] = Sharding()
    tensor: Annotated[TensorParallel, Option("How tp splits layers.")] = TensorParallel()
    pipeline: Annotated[Pipelining, Option("How pp cuts and runs the model.")] = Pipelining()
    checkpoint_activations: Annotated[
        Recompute | None,
        Option(
            "Recompute activations in the backward pass: of every block (full), of every n-th (a "
            "number), or of all but the costly operators (selective)."
        ),
    ] = None
    device_map: Annotated[
        str | Mapping[str, Any] | None,
        Option(
            "Put parts of the model on several devices of one process: names to devices, or auto.",
            must="'auto' or a dict from the names of modules to devices",
        ),
    ] = None
    max_memory: Annotated[
        Mapping[Any, int | str] | None,
        Option(
            "With a device map: how much of each device it may use, such as {'cuda:0': '20GiB'}.",
            must="a dict from devices to bytes, such as {'cuda:0': '20GiB'}",
        ),
    ] = None
    init: Annotated[
        Callable[[Any], None] | None,
        Option(
            "Called with each module of a model from the meta device, to give it values.",
            key="",
            must="a function, called as init(module)",
        ),
    ] = None
    compress: Annotated[
        Compression | None,
        Option("The format in which data-parallel ranks send each other gradients, such as int8."),
    ] = None
    local_steps: Annotated[
        LocalSteps | None,
        Option("Data-parallel ranks train alone for this many steps and then synchronise."),
    ] = None
    reduction: Annotated[Reduction, Option("How gradients are summed over the ranks.")] = (
        Reduction()
    )
    ema: Annotated[
        EMA | None,
        Option(
            "Keep an exponential moving average of the trained weights, to evaluate and export: "
            "its decay, such as 0.999. None: no average."
        ),
    ] = None
    initial_weights: Annotated[
        InitialWeights,
        Option(
            "What ranks start from: rank0, the model that rank 0 has built, or own, what each "
            "has built.",
            must="'rank0' (every rank takes over rank 0's model) or 'own' (every rank keeps what "
            "it has built)",
        ),
    ] = "rank0"
    randomness: Annotated[
        Randomness,
        Option(
            "Where the random numbers of a forward pass (dropout and the like) come from. "
            "layout-free: from the seed, the step, the sample, the module and the place in the "
            "tensor, so that they are the same on every layout; a draw that belongs to no sample "
            "comes from each rank's own stream, and is named. strict: such a draw is refused. "
            "fast: all from each rank's own stream, with torch's own kernels.",
            must="'layout-free', 'strict' or 'fast'",
        ),
    ] = "layout-free"

    @classmethod
    def of(cls, **given: Any) -> EngineOptions:
        """From what a caller wrote: short forms written out, ``None`` for what is by default."""
        if (mode := given.get("checkpoint_activations")) is not None:
            given["checkpoint_activations"] = Recompute.of(mode)
        if (compress := given.get("compress")) is not None:
            compression = Compression.of(compress)
            given["compress"] = compression if compression.formats is not None else None
        if (rounds := given.get("local_steps")) is not None:
            given["local_steps"] = LocalSteps.of(rounds)
        if (reduction := given.get("reduction")) is not None:
            given["reduction"] = Reduction.of(reduction)
        if (average := given.get("ema")) is not None:
            given["ema"] = EMA.of(average)
        if isinstance(freeze := given.get("freeze"), str):
            given["freeze"] = (freeze,)
        elif isinstance(freeze, list):
            given["freeze"] = tuple(freeze)
        for name, value in list(given.items()):
            if value is None and name in _SECTIONS:
                del given[name]
        return cls(**given)

    def __post_init__(self) -> None:
        Layout.smallest(self.layout)  # dp may be left out, for the world to fill
        check(self)
        self._check_unfreezing()
        if self.max_memory is not None and self.device_map is None:
            raise TrainingError(
                "max_memory= bounds the devices of a device map, and there is none. Pass "
                "device_map='auto' with it, or leave it out."
            )

    def _check_unfreezing(self) -> None:
        for pattern, step in (self.unfreeze_at or {}).items():
            whole = isinstance(step, int) and not isinstance(step, bool) and step >= 1
            if not isinstance(pattern, str) or not whole:
                raise TrainingError(
                    f"unfreeze_at={{{shown(pattern)}: {shown(step)}}} must be a dict from patterns "
                    "of names of parameters to numbers of steps, 1 or more, such as "
                    "{'embeddings.*': 1000}."
                )

    def __getitem__(self, name: str) -> Any:
        """``options["precision"]``, as in earlier versions, is ``options.precision``."""
        return getattr(self, name)

    def arguments(self) -> dict[str, Any]:
        """The options by name, as ``paceline.Engine`` takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
