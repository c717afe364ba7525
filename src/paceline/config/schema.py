"""What a config may say: one class per section, every key with its meaning and its default.

The defaults together are the demo (see ``demo.py``). Three of them depend on another key, because
the demo's value makes no sense beside a choice of the user's own:

- ``args`` are the demo's unless the section names its own ``target`` (or optimizer ``name``);
- ``loss`` is the demo's only for the demo's model, else null;
- ``train.steps`` is null once ``train.epochs`` is given.

A config with a model or data of its own inherits none of the demo's training: its learning rate is
constant, without warmup, nothing is clipped, and it must say how long to train (``_own_training``).

Nothing is coerced: ``"3"`` is not a number, ``"yes"`` is not true, and an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, model_validator

import paceline.config.demo as demo
from paceline.config.fields import LayoutText, MetricNames, Positive, RunName, Tag, default_lr
from paceline.config.parallelism import (
    CompressSection,
    EMASection,
    LocalStepsSection,
    LossScalingSection,
    OptionsSection,
    PipelineSection,
    ReductionSection,
    ShardingSection,
    TensorSection,
)
from paceline.config.running import Checkpoint, Hangs, Launch, Track
from paceline.config.sections import Section, keys_of, switch
from paceline.config.sources import Sources
from paceline.config.target_sections import CallbackTarget, MetricTarget, Target
from paceline.config.training import (
    Batch,
    Data,
    EarlyStoppingSection,
    Model,
    Optimizer,
    Schedule,
    Train,
)
from paceline.options import EngineOptions, TrainerOptions
from paceline.options.declare import declared

_engine, _trainer = keys_of(EngineOptions), keys_of(TrainerOptions)


class Config(Section):
    """A whole run. ``Config()`` is the demo."""

    name: RunName = Field(default="run", description="Name of the run and of its folder.")
    tags: list[Tag] = Field(
        default=[], description="Words by which runs are found: paceline runs --tag WORD."
    )
    seed: int = _trainer("seed", le=2**32 - 1)
    code: list[str] | None = Field(
        default=None,
        description="Folders in which the modules of targets are looked for first. null: the "
        "folder of this file; in either case the current folder comes next.",
    )
    deepspeed: str | dict[str, Any] | None = Field(
        default=None,
        description="A DeepSpeed config (ds_config.json), or the mapping in it: its settings are "
        "taken over into the sections below, and null stands here afterwards.",
    )
    model: Model = Field(default=Model(), description="The model to train.")
    loss: Target | None = Field(
        default=Target(target=demo.LOSS),
        description="A function loss(output, target), or a class to build one. null: the model "
        "returns its own loss. Left out: the demo's loss for the demo's model, else null.",
    )
    metrics: Annotated[dict[str, MetricTarget], MetricNames] = _trainer(
        "metrics", default={}, note="Each is an import path or a name of torchmetrics."
    )
    data: Data = Field(default=Data(), description="The data to train and to validate on.")
    optimizer: Optimizer = Field(default=Optimizer(), description="How parameters are updated.")
    schedule: Schedule = Field(default=Schedule(), description="The learning rate over the run.")
    batch: Batch = Field(default=Batch(), description="Samples per step and per forward pass.")
    train: Train = Field(default=Train(), description="How long to train, when to evaluate.")
    early_stopping: Annotated[EarlyStoppingSection | None, BeforeValidator(switch)] = Field(
        default=None,
        description="End a run whose metric no longer improves: true, or a mapping of metric, "
        "patience, mode and min_delta.",
    )
    callbacks: list[CallbackTarget] = _trainer(
        "callbacks", default=[], note="Each is an import path."
    )
    layout: LayoutText = _engine("layout")
    sharding: ShardingSection = _engine("sharding", default=ShardingSection())
    tensor: TensorSection = _engine("tensor", default=TensorSection())
    pipeline: PipelineSection = _engine("pipeline", default=PipelineSection())
    compress: CompressSection = _engine("compress", default=CompressSection())
    local_steps: LocalStepsSection = _engine("local_steps", default=LocalStepsSection())
    reduction: ReductionSection = _engine("reduction", default=ReductionSection())
    ema: EMASection = _engine("ema", default=EMASection())
    device_map: Literal["auto"] | dict[str, str] | None = _engine("device_map")
    max_memory: dict[str, int | str] | None = _engine("max_memory")
    checkpoint_activations: Literal["full", "selective"] | Positive | None = _engine(
        "checkpoint_activations"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = _engine("precision")
    loss_scaling: LossScalingSection = _engine("loss_scaling", default=LossScalingSection())
    initial_weights: Literal["rank0", "own"] = _engine("initial_weights")
    randomness: Literal["layout-free", "strict", "fast"] = _engine("randomness")
    compile: bool = _engine("compile")
    checkpoint: Checkpoint = _trainer("checkpoint", default=Checkpoint())
    launch: Launch = Field(default=Launch(), description="Where the ranks run.")
    hangs: Hangs = Field(default=Hangs(), description="What is done about a run that stands still.")
    track: Track = Field(default=Track(), description="Who listens to the run.")

    _sources: Sources = PrivateAttr(default_factory=Sources)

    def __eq__(self, other: object) -> bool:
        # Where the values were written (_sources) is no part of what they are.
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def engine_options(self, **instead: Any) -> EngineOptions:
        """The engine's options that the config names; ``instead`` replaces some of them."""
        given = {
            name: instead[name] if name in instead else _at(self, found.key)
            for name, found in declared(EngineOptions).items()
            if name in instead or found.key is not None
        }
        return EngineOptions.of(**given)

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        model = _target(data.get("model"), demo.MODEL)
        if model != demo.MODEL and "loss" not in data:
            data = {**data, "loss": None}
        if model != demo.MODEL or _target(data.get("data"), demo.DATA) != demo.DATA:
            data = _own_training(data)
        return data


def _target(section: Any, default: str) -> Any:
    """What ``section``, as written or built, names as its target."""
    if isinstance(section, Mapping):
        return section.get("target", default)
    return getattr(section, "target", default)


def _own_training(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with the defaults of a config with a model or data of its own written in.

    A section that is no mapping is left for its own check.
    """
    optimizer = data.get("optimizer")
    name = optimizer.get("name", "adamw") if isinstance(optimizer, Mapping) else "adamw"
    if isinstance(optimizer, Optimizer):
        name = optimizer.name
    result = dict(data)
    for key, defaults in {**demo.INSTEAD, "optimizer": {"lr": default_lr(name)}}.items():
        section = result.get(key, {})
        if isinstance(section, BaseModel):
            section = {field: getattr(section, field) for field in section.model_fields_set}
        if isinstance(section, Mapping):
            result[key] = {**defaults, **section}
    return result


def _at(config: Config, key: str | None) -> Any:
    """What ``config`` says at ``key``, as an engine takes it."""
    value: Any = config
    for name in (key or "").split("."):
        value = getattr(value, name)
    return value.options() if isinstance(value, OptionsSection) else value
