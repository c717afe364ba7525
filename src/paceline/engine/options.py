"""The engine's settings, and what they are when nobody says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import TrainingError
from paceline.layout import Layout

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
)


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
