"""The numbers in an event, under the names they have in TensorBoard and MLflow."""

from __future__ import annotations

from paceline.events import EpochDone, EvalDone, MemoryMeasured, StepDone

MEMORY = ("parameters", "gradients", "optimizer", "buffers", "activations", "peak", "current")


def scalars(event: StepDone | EvalDone | EpochDone | MemoryMeasured) -> list[tuple[str, float]]:
    """(name, value) pairs of one event; all belong to ``event.step``."""
    if isinstance(event, EvalDone):
        return [(f"validation/{name}", value) for name, value in event.metrics.items()]
    if isinstance(event, EpochDone):
        return [("epoch/loss", event.loss)]
    if isinstance(event, MemoryMeasured):
        # The rank that holds most is the one that runs out.
        return [(f"memory/{name}", float(max(getattr(event, name)))) for name in MEMORY]
    found = [("train/loss", event.loss), ("train/lr", event.lr)]
    if event.grad_norm is not None:
        found.append(("train/grad_norm", event.grad_norm))
    if event.seconds > 0:
        found.append(("train/samples_per_second", event.samples / event.seconds))
    return found
