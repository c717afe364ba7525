"""The engine's settings, and what they are when nobody says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.engine.initial_weights import InitialWeights
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.parallel.compose import Ways
from paceline.parallel.device_map import DeviceLike
from paceline.parallel.pipeline.options import Pipelining
from paceline.parallel.recompute import Recompute
from paceline.parallel.shard import Sharding
from paceline.parallel.tensor.options import TensorParallel
from paceline.wire import Compression, LocalSteps, Reduction

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
Schedule = Callable[[int], float] | LRScheduler


class EngineOptions(TypedDict, total=False):
    """The settings that ``Engine`` and ``Trainer`` share; :class:`Engine` explains them."""

    layout: str | Layout
    microbatch: int | None
    precision: str
    clip_norm: float | None
    clip_value: float | None
    schedule: Schedule | None
    compile: bool
    nonfinite: Literal["stop", "skip", "ignore"]
    sync_batchnorm: bool
    forward: Callable[[nn.Module, Any], Any] | None
    count: Callable[[Any], int | Tensor] | None
    sharding: Sharding | None
    tensor: TensorParallel | None
    pipeline: Pipelining | None
    checkpoint_activations: Recompute | str | int | None
    device_map: str | Mapping[str, DeviceLike] | None
    max_memory: Mapping[DeviceLike, int | str] | None
    init: Callable[[nn.Module], None] | None
    compress: Compression | str | None
    local_steps: LocalSteps | int | None
    reduction: Reduction | None
    initial_weights: InitialWeights


DEFAULTS = EngineOptions(
    layout="auto",
    microbatch=None,
    precision="fp32",
    clip_norm=None,
    clip_value=None,
    schedule=None,
    compile=False,
    nonfinite="stop",
    sync_batchnorm=False,
    forward=None,
    count=None,
    sharding=None,
    tensor=None,
    pipeline=None,
    checkpoint_activations=None,
    device_map=None,
    max_memory=None,
    init=None,
    compress=None,
    local_steps=None,
    reduction=None,
    initial_weights="rank0",
)


def ways_of(options: EngineOptions) -> Ways:
    """How to spread a model, from the options that say so."""
    recompute, compression = options["checkpoint_activations"], compression_of(options)
    local_steps = local_steps_of(options)
    return Ways(
        sharding=options["sharding"] or Sharding(),
        tensor=options["tensor"] or TensorParallel(),
        pipeline=options["pipeline"] or Pipelining(),
        recompute=None if recompute is None else Recompute.of(recompute),
        compile=options["compile"],
        device_map=options["device_map"],
        max_memory=options["max_memory"],
        compress=None if compression is None else compression.formats,
        reduction=Reduction.of(options["reduction"]),
        local_start=None if local_steps is None else local_steps.start,
        sync_batchnorm=options["sync_batchnorm"],
    )


def compression_of(options: EngineOptions | Mapping[str, Any]) -> Compression | None:
    """How gradients travel, where they do not as they are."""
    asked = options["compress"]
    compression = None if asked is None else Compression.of(asked)
    return None if compression is None or compression.formats is None else compression


def local_steps_of(options: EngineOptions) -> LocalSteps | None:
    """How replicas train alone, where they do."""
    asked = options["local_steps"]
    return None if asked is None else LocalSteps.of(asked)


def check_option_names(
    options: Mapping[str, Any], who: str = "Engine", others: Iterable[str] = ()
) -> None:
    """Refuse an option that the engine does not have; ``others`` are arguments of ``who``."""
    known = sorted({*DEFAULTS, *others})
    for name in options:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise TrainingError(
                f"{who} got an unknown argument {name}.{hint} It takes {', '.join(known)}."
            )
