"""Averaged weights: an exponential moving average of the parameters, kept beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.errors import TrainingError
from paceline.options.arguments import documented
from paceline.options.declare import Option, check

Weights = Literal["model", "ema"]
"""Whose weights: those that are trained, or their average."""


def check_weights(weights: str | None, whose: str) -> None:
    """Raise unless ``weights`` names one of the two; ``None`` is for whoever has a default."""
    if weights not in (None, "model", "ema"):
        raise TrainingError(f"{whose}: weights={weights!r} must be 'model' or 'ema'.")


@documented
@dataclass(frozen=True)
class EMA:
    """An exponential moving average of the trained parameters: ``average ← decay · average + …``.

    See docs/guides/averaged-weights.md.
    """

    config_section: ClassVar[str] = "ema"

    decay: Annotated[
        float,
        Option(
            "How much of the average stays when it moves towards the parameters: 0.999 averages "
            "over about the last 1000 times.",
            ge=0,
            lt=1,
            must="a number from 0 to below 1, such as 0.999",
        ),
    ] = 0.999
    every: Annotated[int, Option("The average moves after every this many steps.", ge=1)] = 1
    start: Annotated[
        int,
        Option(
            "The average begins with the parameters as they are after this many steps. 0: with "
            "those that the run starts from.",
            ge=0,
        ),
    ] = 0
    evaluate: Annotated[
        bool,
        Option(
            "Evaluations measure the averaged weights, too, as ema/loss and so on, in a second "
            "pass over the data."
        ),
    ] = True

    def __post_init__(self) -> None:
        check(self, "ema: ")

    @classmethod
    def of(cls, value: EMA | float) -> EMA:
        """A number alone is the decay."""
        if isinstance(value, cls):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(decay=value)
        raise TrainingError(
            f"ema={value!r} must be a decay such as 0.999, or paceline.EMA(decay=0.999, ...)."
        )

    def moves_after(self, step: int) -> bool:
        """Whether the average moves once ``step`` steps are done."""
        return step > self.start and (step - self.start) % self.every == 0
