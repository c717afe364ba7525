"""The sections about how a model and its gradients are spread over ranks.

Each is made of the options of the same name in ``paceline.options``, and gives them by
``options()``, which are what the engine takes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from paceline.config.sections import Section, check_as_options, keys_of, limits
from paceline.errors import TrainingError
from paceline.layout.pipeline_schedules import SCHEDULES
from paceline.options import (
    EMA,
    Compression,
    Form,
    LocalSteps,
    LossScaling,
    Pipelining,
    Reduction,
    Sharding,
    TensorParallel,
)

_sharding, _tensor, _pipeline = keys_of(Sharding), keys_of(TensorParallel), keys_of(Pipelining)
_compress, _local, _reduction = keys_of(Compression), keys_of(LocalSteps), keys_of(Reduction)
_ema, _scaling = keys_of(EMA), keys_of(LossScaling)


def spelled_out(section: str, value: Any) -> Any:
    """The mapping that ``compress: int8`` or ``ema: 0.999`` stands for; else ``value``."""
    if section == "compress" and isinstance(value, str):
        return {"format": value}
    if section == "local_steps" and isinstance(value, int) and not isinstance(value, bool):
        return {"every": value}
    if section == "ema" and isinstance(value, int | float) and not isinstance(value, bool):
        return {"decay": value}
    return value


def _format(text: str) -> str:
    try:
        Form.parse(text)
    except TrainingError as error:
        raise ValueError(str(error).removeprefix("compress: ")) from None
    return text


def _rules(rules: dict[str, str]) -> dict[str, str]:
    for pattern, text in rules.items():
        try:
            _format(text)
        except ValueError as error:
            raise ValueError(f"rule for {pattern!r}: {error}") from None
    return rules


Format = Annotated[str, AfterValidator(_format)]


class OptionsSection(Section):
    """A section of which options are made, which check it."""

    @model_validator(mode="after")
    def _check(self) -> OptionsSection:
        check_as_options(self.options)
        return self

    @abstractmethod
    def options(self) -> Any:
        """For the engine."""


class ShardingSection(OptionsSection):
    """How ``zero`` shards a model; see docs/guides/sharding.md."""

    units: str | list[str] | Annotated[int, limits(Sharding, "units")] | None = _sharding("units")
    reshard: bool | Annotated[int, limits(Sharding, "reshard")] | None = _sharding("reshard")
    dtype: Literal["bf16", "fp16"] | None = _sharding("dtype")
    offload: Literal["parameters", "optimizer"] | None = _sharding("offload")

    def options(self) -> Sharding:
        """For the engine."""
        return Sharding(**self.model_dump())


class TensorSection(OptionsSection):
    """How ``tp`` splits layers; see docs/guides/tensor.md."""

    plan: Literal["auto"] | dict[str, str] = _tensor("plan")
    sequence: bool = _tensor("sequence")
    vocabulary: bool = _tensor("vocabulary")

    def options(self) -> TensorParallel:
        """For the engine."""
        return TensorParallel(**self.model_dump())


class PipelineSection(OptionsSection):
    """How ``pp`` cuts a model and runs it; see docs/guides/pipeline.md."""

    schedule: Literal[SCHEDULES] = _pipeline("schedule")  # type: ignore[valid-type]
    cuts: list[str] | None = _pipeline("cuts")
    balance: Literal["parameters", "flops", "time"] = _pipeline("balance")
    stages_per_rank: int | None = _pipeline("stages_per_rank")
    microbatches: int | None = _pipeline("microbatches")

    def options(self) -> Pipelining:
        """For the engine."""
        return Pipelining(**self.model_dump())


class CompressSection(OptionsSection):
    """The format in which gradients are sent; see docs/guides/compression.md."""

    format: Format = _compress("format")
    error_feedback: bool | None = _compress("error_feedback")
    warmup_steps: int | None = _compress("warmup_steps")
    smallest: int = _compress("smallest")
    embeddings: bool = _compress("embeddings")
    rules: Annotated[dict[str, str], AfterValidator(_rules)] = _compress("rules")
    seed: int = _compress("seed")

    def options(self) -> Compression:
        """For the engine."""
        return Compression(**self.model_dump())


class LocalStepsSection(OptionsSection):
    """Replicas that train alone and synchronise every so often; see docs/guides/local-steps.md."""

    every: int | None = _local("every", default=None, note="null: all ranks step together.")
    method: Literal["average", "diloco"] = _local("method")
    start: int = _local("start")
    outer_lr: float = _local("outer_lr")
    outer_momentum: float = _local("outer_momentum")
    exchange: Format = _local("exchange")
    fragments: int = _local("fragments")
    overlap: int = _local("overlap")

    def options(self) -> LocalSteps | None:
        """For the engine."""
        every, rest = self.every, self.model_dump(exclude={"every"})
        return None if every is None else LocalSteps(every=every, **rest)


class EMASection(OptionsSection):
    """An average of the weights, kept beside them; see docs/guides/averaged-weights.md."""

    decay: float | None = _ema("decay", default=None, note="null: no average is kept.")
    every: int = _ema("every")
    start: int = _ema("start")
    evaluate: bool = _ema("evaluate")

    def options(self) -> EMA | None:
        """For the engine."""
        decay, rest = self.decay, self.model_dump(exclude={"decay"})
        return None if decay is None else EMA(decay=decay, **rest)


class LossScalingSection(OptionsSection):
    """The gradient scaler of fp16."""

    init_scale: float = _scaling("init_scale")
    growth_factor: float = _scaling("growth_factor")
    backoff_factor: float = _scaling("backoff_factor")
    growth_interval: int = _scaling("growth_interval")

    def options(self) -> LossScaling:
        """For the engine."""
        return LossScaling(**self.model_dump())


class ReductionSection(OptionsSection):
    """How gradients are summed over the ranks; see docs/guides/reduction.md."""

    hierarchy: Literal["auto", "always", "never"] = _reduction("hierarchy")
    links: dict[str, str] | None = _reduction("links")
    bucket_mib: Annotated[float, limits(Reduction, "bucket_mib")] | Literal["tuned"] | None = (
        _reduction("bucket_mib")
    )
    overlap: bool = _reduction("overlap")

    def options(self) -> Reduction:
        """For the engine."""
        return Reduction(**self.model_dump())
