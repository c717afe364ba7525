"""Steps without talking: replicas train alone, and meet every so often. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import TrainingError
from paceline.wire.compression import Compression, Form

METHODS = ("average", "diloco")


@dataclass(frozen=True)
class LocalSteps:
    """Each data-parallel rank is a replica that trains alone; they meet every ``every`` steps.

    Args:
        every: steps between two meetings.
        method: ``average`` (parameters become the mean over the replicas: local SGD) or ``diloco``
            (how far the replicas came is a gradient to an outer optimizer with Nesterov momentum).
        start: steps of ordinary, synchronous training first (post-local SGD).
        outer_lr, outer_momentum: of DiLoCo's outer optimizer.
        exchange: the format in which replicas tell each other how far they came: ``none``,
            ``int8`` or another one of :class:`paceline.Compression`'s, with error feedback.
        fragments: parts of the model that meet in turn, each every ``every`` steps.
        overlap: steps that go on while a meeting takes place; its result is taken over after them.
    """

    every: int = 50
    method: str = "diloco"
    start: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    exchange: str = "none"
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise TrainingError(
                f"local steps: method={self.method!r} must be one of {', '.join(METHODS)}."
            )
        for name, least in (("every", 1), ("start", 0), ("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TrainingError(
                    f"local steps: {name}={value!r} must be a whole number, {least} or more."
                )
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
        if not _is_number(self.outer_lr) or not self.outer_lr > 0:
            raise TrainingError(f"local steps: outer_lr={self.outer_lr!r} must be above 0.")
        if not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise TrainingError(
                f"local steps: outer_momentum={self.outer_momentum!r} must be from 0 to below 1."
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
