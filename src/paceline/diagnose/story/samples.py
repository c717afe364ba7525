"""Which samples a step took, from the events of a run. A pure function."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.events import Event, RunStarted, StepDone


def samples_of(events: Sequence[Event], step: int) -> str:
    """`` (positions 64 to 71 in the order of epoch 1)``: the samples of a step; empty if unknown.

    Known where the record holds all steps of the epoch before it. Positions count from 0.
    """
    started = [e for e in events if isinstance(e, RunStarted)]
    batch = started[-1].global_batch if started else None
    done = {e.step: e for e in events if isinstance(e, StepDone)}
    if batch is None or (step > 1 and step - 1 not in done):
        return ""
    epoch = done[step - 1].epoch if step > 1 else 0
    first, before = 0, step - 1
    while before in done and done[before].epoch == epoch:
        first += done[before].samples
        before -= 1
    if before > 0 and before not in done:
        return ""  # the epoch began before what is recorded
    size = started[-1].samples_per_epoch
    if size is not None and first >= size:
        epoch, first = epoch + 1, 0
    last = first + batch - 1 if size is None else min(first + batch, size) - 1
    return f" (positions {first} to {last} in the order of epoch {epoch + 1})"
