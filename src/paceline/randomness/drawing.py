"""What the handlers of torch's random functions know of the forward pass that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from paceline.randomness.table import DrawnNumbers, TensorPart


class Drawing(Protocol):
    """Gives the numbers of one draw after the other: ``paceline.randomness.forward``'s."""

    current: Any
    """The samples of the microbatch; None outside of a forward pass."""
    part: TensorPart | None
    """Which part of the drawn tensors this rank holds; None for all."""
    assume_computed: bool
    """Whether even shapes that are written down are those of values of the model."""
    only_counts: bool
    """Whether draws are counted and nothing else."""

    def numbers(
        self,
        what: Any,
        shape: Sequence[int],
        *,
        computed: bool,
        shared: bool = False,
        **hints: bool,
    ) -> DrawnNumbers | None:
        """The numbers of one draw; None where it is left to the rank's own stream.

        ``what`` is the function, ``shape`` that of what this rank holds. ``shared``: all samples
        see the same numbers. See ``paceline.randomness.attribution.attribute`` for the rest.
        """

    def leave(self, what: Any, shape: tuple[int, ...]) -> None:
        """A draw that cannot be controlled is left to the rank's own stream, or refused."""

    def note(self, key: str, text: str) -> None:
        """Tell ``text`` once."""

    def on_part(self, part: TensorPart | None) -> AbstractContextManager[None]:
        """What is drawn inside is for a ``part`` of a tensor."""
