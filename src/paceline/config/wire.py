"""The sections about what goes over the wire; see docs/guides/compression.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from paceline.config.fields import Positive
from paceline.config.sections import Section
from paceline.errors import TrainingError
from paceline.wire import Compression, Form, LocalSteps, Reduction


def spelled_out(section: str, value: Any) -> Any:
    """The mapping that ``compress: int8`` or ``local_steps: 50`` stands for; else ``value``."""
    if section == "compress" and isinstance(value, str):
        return {"format": value}
    if section == "local_steps" and isinstance(value, int) and not isinstance(value, bool):
        return {"every": value}
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


def _built(make: Callable[[], object]) -> None:
    """Have the options check themselves; the section's name comes with every error of a config."""
    try:
        make()
    except TrainingError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


class CompressSection(Section):
    """In which form gradients travel; see docs/guides/compression.md."""

    format: Format = Field(
        default="none",
        description="none, fp16, bf16, int8, sign, topk:RATIO, randomk:RATIO or powersgd:RANK; the "
        "last three may go on in 16 bits: powersgd:4+fp16.",
    )
    error_feedback: bool | None = Field(
        default=None,
        description="Send later what was left behind; null: where the format needs it.",
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="Steps without compression at the start; null: 100 for sign, topk, randomk and "
        "powersgd, else none.",
    )
    smallest: int = Field(
        default=1024,
        ge=0,
        description="Tensors with fewer elements, and vectors, travel as they are.",
    )
    embeddings: bool = Field(default=False, description="Compress embeddings, too.")
    rules: Annotated[dict[str, str], AfterValidator(_rules)] = Field(
        default_factory=dict,
        description="Other formats by name pattern, like {'embedding.*': 'none'}.",
    )
    seed: int = Field(default=0, ge=0, description="Of what is drawn (randomk, powersgd).")

    @model_validator(mode="after")
    def _check(self) -> CompressSection:
        _built(self.options)
        return self

    def options(self) -> Compression:
        """For the engine."""
        return Compression(**self.model_dump())


class LocalStepsSection(Section):
    """Replicas that train alone and meet every so often; see docs/guides/local-steps.md."""

    every: Positive | None = Field(
        default=None, description="Steps between two meetings; null: all ranks step together."
    )
    method: Literal["average", "diloco"] = Field(
        default="diloco", description="What a meeting does with how far each replica has come."
    )
    start: int = Field(default=0, ge=0, description="Ordinary, synchronous steps first.")
    outer_lr: float = Field(default=0.7, gt=0, description="Of DiLoCo's outer optimizer.")
    outer_momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Nesterov momentum of DiLoCo's outer optimizer."
    )
    exchange: Format = Field(
        default="none", description="The format in which replicas tell how far they came."
    )
    fragments: Positive = Field(
        default=1, description="Parts of the model that meet in turn, each every so many steps."
    )
    overlap: int = Field(
        default=0, ge=0, description="Steps that go on while a meeting takes place."
    )

    @model_validator(mode="after")
    def _check(self) -> LocalStepsSection:
        _built(self.options)
        return self

    def options(self) -> LocalSteps | None:
        """For the engine."""
        every, rest = self.every, self.model_dump(exclude={"every"})
        return None if every is None else LocalSteps(every=every, **rest)


class ReductionSection(Section):
    """How gradients are summed over the ranks; see docs/guides/reduction.md."""

    hierarchy: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Sum within each node first, then across nodes; auto: where it is faster.",
    )
    links: dict[str, str] | None = Field(
        default=None,
        description="The links, like {within: 10 Gbit/s 0.05 ms, across: 100 Mbit/s 5 ms}; null: "
        "measured where that is needed.",
    )
    bucket_mib: Annotated[float, Field(gt=0)] | Literal["tuned"] | None = Field(
        default=None,
        description="MiB of gradients in a message; tuned: from measured links and backward time; "
        "null: torch's default.",
    )
    overlap: bool = Field(default=True, description="Send while the backward goes on.")

    @model_validator(mode="after")
    def _check(self) -> ReductionSection:
        _built(self.options)
        return self

    def options(self) -> Reduction:
        """For the engine."""
        return Reduction(**self.model_dump())
