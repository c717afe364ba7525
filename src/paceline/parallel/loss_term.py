"""What a forward pass gives: a loss that can be added up over microbatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Term:
    """``total / count`` is the mean loss of a microbatch; ``total`` carries the gradient."""

    total: Tensor
    count: Tensor | int
    output: Any

    def with_total(self, total: Tensor) -> Term:
        """The same term with its total replaced."""
        return replace(self, total=total)
