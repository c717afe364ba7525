"""Local SGD and DiLoCo: replicas train alone, and meet every so often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.errors import TrainingError
from paceline.options.arguments import documented
from paceline.options.compression import Compression, Form
from paceline.options.declare import Option, check


@documented
@dataclass(frozen=True)
class LocalSteps:
    """Each data-parallel rank is a replica that trains alone; they meet every ``every`` steps.

    See docs/guides/local-steps.md.
    """

    config_section: ClassVar[str] = "local_steps"

    every: Annotated[int, Option("Steps between two synchronisations.", ge=1)] = 50
    method: Annotated[
        Literal["average", "diloco"],
        Option(
            "average: parameters become the mean over the replicas (local SGD). diloco: the "
            "mean movement of the replicas is a gradient for an outer optimizer with Nesterov "
            "momentum."
        ),
    ] = "diloco"
    start: Annotated[
        int, Option("Steps of ordinary, synchronous training first (post-local SGD).", ge=0)
    ] = 0
    outer_lr: Annotated[
        float, Option("Learning rate of DiLoCo's outer optimizer.", gt=0, must="above 0")
    ] = 0.7
    outer_momentum: Annotated[
        float,
        Option(
            "Nesterov momentum of DiLoCo's outer optimizer.", ge=0, lt=1, must="from 0 to below 1"
        ),
    ] = 0.9
    exchange: Annotated[
        str,
        Option(
            "The format in which replicas send how far they have moved: none, int8 or another "
            "one of compress.format, with error feedback."
        ),
    ] = "none"
    fragments: Annotated[
        int,
        Option(
            "The model synchronises in this many parts, in turn, so that the network is used "
            "evenly.",
            ge=1,
        ),
    ] = 1
    overlap: Annotated[
        int,
        Option(
            "Steps during which a synchronisation runs in the background; its result is "
            "applied after them.",
            ge=0,
        ),
    ] = 0

    def __post_init__(self) -> None:
        check(self, "local steps: ")
        if self.fragments > self.every:
            raise TrainingError(
                f"local steps: fragments={self.fragments} with every={self.every}: each fragment "
                "meets at a step of its own, so there can be no more of them than steps. Lower "
                "fragments, or raise every."
            )
        if self.overlap >= self.every:
            raise TrainingError(
                f"local steps: overlap={self.overlap} must be below every={self.every}: a meeting "
                "has to be over when the next one begins."
            )
        try:
            Form.parse(self.exchange)
        except TrainingError as error:
            told = str(error).removeprefix("compress: ")
            raise TrainingError(f"local steps: exchange: {told}") from None

    @classmethod
    def of(cls, value: LocalSteps | int) -> LocalSteps:
        """A number alone is how many steps lie between two meetings."""
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(every=value)
        raise TrainingError(
            f"local_steps={value!r} must be a number of steps such as 50, or "
            "paceline.LocalSteps(...)."
        )

    @property
    def compression(self) -> Compression:
        """How the distances travel."""
        return Compression(self.exchange, warmup_steps=0, embeddings=True)

    def meeting(self, step: int) -> int | None:
        """The fragment that meets after ``step`` steps; ``None`` where none does.

        The last fragment meets where the whole model would, those before it in equal distances.
        """
        if step <= self.start:
            return None
        into = (step - self.start - 1) % self.every + 1  # 1 is the first step of a round
        for fragment in range(self.fragments):
            if into == (fragment + 1) * self.every // self.fragments:
                return fragment
        return None

    def is_alone(self, steps_done: int) -> bool:
        """Whether the step after ``steps_done`` steps is one that waits for no other replica."""
        return steps_done >= self.start


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Places of tensors of ``sizes``, cut in their order into ``count`` parts of about equal size.

    A part may be empty where there are few tensors, or one is very large.
    """
    total = sum(sizes)
    cut: list[list[int]] = [[] for _ in range(count)]
    passed = 0
    for place, size in enumerate(sizes):
        middle = passed + size / 2
        cut[min(count - 1, int(middle * count / max(total, 1)))].append(place)
        passed += size
    return cut
