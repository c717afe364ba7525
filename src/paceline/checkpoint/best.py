"""Which checkpoint is the best: by the metric, and in the direction, that the run was told.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import CheckpointError
from paceline.options.checkpointing import is_loss

Mode = Literal["min", "max"]
_KEY = "best"


@dataclass(frozen=True)
class Goal:
    """What a run tries to make small (``min``) or large (``max``)."""

    metric: str
    mode: Mode


def best_info(metric: str | None, mode: Mode) -> dict[str, Any]:
    """What a checkpoint keeps of it in its info; nothing where the run has no such metric."""
    return {} if metric is None else {_KEY: {"metric": metric, "mode": mode}}


def metrics_in(info: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in the info of a checkpoint, by name; what is no number is left out."""
    metrics = info.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def goal_of(
    infos: Sequence[Mapping[str, Any]],
    metric: str | None = None,
    mode: Mode | None = None,
    where: str = "these checkpoints",
) -> Goal:
    """By what checkpoints with these ``infos``, oldest first, are to be compared.

    What is not given is what the newest of them was saved with. Raises ``CheckpointError`` where
    none says: a guess would make the worst the best. Only of a loss it is known that less is more.
    """
    if mode not in (None, "min", "max"):
        raise CheckpointError(f"mode={mode!r}: it is 'min' or 'max'.")
    recorded = [goal for info in reversed(infos) if (goal := _recorded(info)) is not None]
    if metric is None:
        if not recorded:
            known = ", ".join(_known(infos)) or "none was saved with any"
            raise CheckpointError(
                f"{where}: the run was not told by which metric a checkpoint is the best (its "
                f"checkpoint.best). Name the metric ({known}), and mode min or max."
            )
        metric = recorded[0].metric
    if mode is None:
        modes = [goal.mode for goal in recorded if goal.metric == metric]
        compared = metric in _known(infos)
        if not modes and compared and not is_loss(metric):
            raise CheckpointError(
                f"{where}: the run was not told whether a small or a large {metric!r} is better. "
                "Say so: mode min or max."
            )
        mode = modes[0] if modes else "min"
    return Goal(metric, mode)


def _recorded(info: Mapping[str, Any]) -> Goal | None:
    said = info.get(_KEY)
    if not isinstance(said, dict):
        return None
    metric, mode = said.get("metric"), said.get("mode")
    return Goal(metric, mode) if isinstance(metric, str) and mode in ("min", "max") else None


def _known(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that any of them was saved with."""
    found = [info.get("metrics") for info in infos]
    return sorted({str(name) for one in found if isinstance(one, dict) for name in one})
