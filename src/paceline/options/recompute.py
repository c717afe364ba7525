"""Activation checkpointing: what to forget in the forward pass and compute again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from paceline.errors import TrainingError
from paceline.options.arguments import documented
from paceline.options.declare import Option, check

BlockRule = str | Sequence[str] | Callable[[str, Any], bool]
"""One pattern on module names, several, or a function ``(name, module) -> bool``."""


@documented
@dataclass(frozen=True)
class Recompute:
    """What to forget in the forward pass and compute again in the backward.

    A config has the short forms alone: ``checkpoint_activations: full``, ``selective`` or a number.
    """

    mode: Annotated[
        Literal["full", "selective"],
        Option(
            "full: everything inside a block. selective: all but the results of the operators in "
            "keep.",
            must="'full' or 'selective' (or, for short, a whole number n: every n-th block in "
            "full)",
        ),
    ] = "full"
    every: Annotated[
        int, Option("Recompute every this many blocks: 2 leaves every second one alone.", ge=1)
    ] = 1
    keep: Annotated[
        Sequence[Any] | None,
        Option(
            "With selective: operators whose results are kept, as torch.ops.aten.mm or 'aten.mm'. "
            "None: matrix products, convolutions, attention and collectives, the costly ones.",
            must="a list of operators such as torch.ops.aten.mm or 'aten.mm'",
        ),
    ] = None
    blocks: Annotated[
        BlockRule | None,
        Option(
            "Which modules are the blocks: patterns on their names such as 'layers.*', or a "
            "function (name, module) -> bool. None: the model's repeated blocks.",
            must="a pattern on module names such as 'layers.*', a list of them, or a function "
            "(name, module) -> bool",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self, "recompute: ")
        if self.keep is not None and self.mode == "full":
            raise TrainingError(
                "recompute: keep= names operators whose results are kept, but mode='full' keeps "
                "none. Use mode='selective', or leave keep out."
            )

    @classmethod
    def of(cls, mode: Recompute | str | int) -> Recompute:
        """``mode`` written out: ``"full"``, ``"selective"`` and a number n are short forms."""
        if isinstance(mode, Recompute):
            return mode
        if isinstance(mode, int) and not isinstance(mode, bool):
            return cls(every=mode)
        return cls(mode=str(mode) if isinstance(mode, bool) else mode)  # type: ignore[arg-type]
