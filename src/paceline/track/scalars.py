"""The numbers in an event, under the names they have in TensorBoard and MLflow."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.events import (
    EpochDone,
    EvalDone,
    Event,
    Logged,
    MemoryMeasured,
    StepDone,
    StepSplit,
    Straggler,
    WireUsed,
)

MEMORY = ("parameters", "gradients", "optimizer", "buffers", "activations", "peak", "current")


Numbers = (
    StepDone | Logged | EvalDone | EpochDone | MemoryMeasured | StepSplit | Straggler | WireUsed
)
"""The events that hold numbers worth a curve."""


def scalars(event: Event) -> list[tuple[str, float]]:
    """(name, value) pairs of one event; all belong to its ``step``."""
    match event:
        case StepDone():
            return _of_step(event)
        case EvalDone():
            return [(f"validation/{name}", value) for name, value in event.metrics.items()]
        case EpochDone():
            return [("epoch/loss", event.loss), *_named("epoch", event.logged)]
        case Logged():
            return _named("train", event.values)
        case MemoryMeasured():
            # The rank that holds most is the one that runs out.
            return [(f"memory/{name}", float(max(getattr(event, name)))) for name in MEMORY]
        case StepSplit():
            return _of_split(event)
        case WireUsed():
            # The rank that sends most is the one that the others wait for.
            return [("wire/bytes_per_step", max(event.bytes_sent) / event.steps)]
        case Straggler():
            return [("straggler/seconds", event.costs), ("straggler/rank", float(event.rank))]
        case _:
            return []


def _of_step(event: StepDone) -> list[tuple[str, float]]:
    found = [("train/loss", event.loss), ("train/lr", event.lr)]
    if event.grad_norm is not None:
        found.append(("train/grad_norm", event.grad_norm))
    if event.seconds > 0:
        found.append(("train/samples_per_second", event.samples / event.seconds))
    return [*found, *_named("train", event.logged)]


def _named(group: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(f"{group}/{name}", value) for name, value in values.items()]


def _of_split(event: StepSplit) -> list[tuple[str, float]]:
    """The mean over the ranks, and the rank that takes longest: apart where one is slow."""
    found = []
    for phase, seconds in event.phases.items():
        if seconds:
            found.append((f"split/{phase}", sum(seconds) / len(seconds)))
            found.append((f"split_slowest/{phase}", max(seconds)))
    if (speedup := _speedup(event)) is not None:
        found.append(("split/speedup", speedup))
    if busy := event.gpu_utilisation:
        found.append(("gpu/utilisation", sum(busy) / len(busy)))
    return found


def _speedup(event: StepSplit) -> float | None:
    """Ranks times the share of their time in which they do not wait: what waiting leaves of it."""
    waiting = event.phases.get("waiting") or []
    total = sum(map(sum, event.phases.values()))
    return len(waiting) * (1 - sum(waiting) / total) if len(waiting) > 1 and total > 0 else None
