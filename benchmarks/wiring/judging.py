"""What the steps of a training say: pure functions from what was noted to the figures told."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from wiring.running import Outcome, Step

# Ethernet, IPv4, and TCP with its timestamps.
_HEADERS = 14 + 20 + 32
WINDOW = 20
"""A loss is the mean over so many steps: everybody trains on the same batches in them."""


@dataclass(frozen=True)
class Row:
    """A way at one link."""

    name: str
    steps: int = 0
    step_s: float | None = None
    faster: float | None = None
    """Step time of plain DDP, divided by this one's."""
    kernel: float | None = None
    """Bytes a step and rank by the interface's counter: all of them, headers and all."""
    payload: float | None = None
    """The same without the headers of its packets."""
    counted: float | None = None
    """What a step sends as it is counted by whoever trains."""
    compared_at: int = 0
    """The step after which losses are compared: the last one asked for, or the last one done."""
    loss: float | None = None
    reference: float | None = None
    """The loss of plain DDP after as many steps."""
    by_time: float | None = None
    """The loss after the seconds that everybody gets."""
    steps_by_time: int | None = None
    error: str | None = None

    @property
    def kernel_to_counted(self) -> float | None:
        """Headers and acknowledgements, and what is sent beside gradients, come on top."""
        return self.kernel / self.counted if self.kernel and self.counted else None

    @property
    def payload_to_counted(self) -> float | None:
        """What is sent beside gradients comes on top."""
        return self.payload / self.counted if self.payload and self.counted else None

    @property
    def loss_ratio(self) -> float | None:
        """1.01: one per cent worse than plain DDP after as many steps."""
        return self.loss / self.reference if self.loss and self.reference else None


def rows(
    outcomes: Sequence[Outcome],
    plain: Outcome,
    reference: Sequence[Step],
    steps: int,
    seconds: float,
) -> list[Row]:
    """All ways at one link; ``reference`` are the steps of plain DDP on a link without limits."""
    base = step_seconds(plain)
    return [_row(outcome, base, reference, steps, seconds) for outcome in outcomes]


def step_seconds(outcome: Outcome) -> float | None:
    """The median of the steps after those that are unlike the rest."""
    steps = outcome.steps[outcome.way.settled_after :]
    gaps = [after.time - before.time for before, after in itertools.pairwise(steps)]
    return statistics.median(gaps) if gaps else None


def loss_after(steps: Sequence[Step], number: int) -> float | None:
    """The mean loss of the last steps up to a step."""
    losses = [s.loss for s in steps if s.loss is not None and number - WINDOW < s.number <= number]
    return statistics.fmean(losses) if losses else None


def steps_within(steps: Sequence[Step], seconds: float) -> int | None:
    """How many steps were done so many seconds after the start, if it went on for so long."""
    if not steps or steps[-1].time - steps[0].time < seconds:
        return None
    return max(step.number for step in steps if step.time - steps[0].time <= seconds)


@dataclass(frozen=True)
class Sent:
    """Bytes a step and rank, over the same steps: see ``Row``."""

    kernel: float | None = None
    payload: float | None = None
    counted: float | None = None


def bytes_a_step(outcome: Outcome) -> Sent:
    """What the steps sent after those that are unlike the rest."""
    steps = outcome.steps[outcome.way.settled_after :]
    if len(steps) < 2:
        return Sent()
    first, last = steps[0], steps[-1]
    number = last.number - first.number
    kernel = (last.kernel - first.kernel) / number
    packets = (last.packets - first.packets) / number
    counted = None
    if first.counted is not None and last.counted is not None:
        counted = (last.counted - first.counted) / number
    return Sent(kernel, kernel - _HEADERS * packets, counted)


def _row(
    outcome: Outcome, base: float | None, reference: Sequence[Step], steps: int, seconds: float
) -> Row:
    if outcome.error is not None:
        return Row(outcome.way.name, outcome.done, error=outcome.error)
    own, sent = step_seconds(outcome), bytes_a_step(outcome)
    at = min(steps, outcome.done)
    in_time = steps_within(outcome.steps, seconds)
    return Row(
        name=outcome.way.name,
        steps=outcome.done,
        step_s=own,
        faster=base / own if base and own else None,
        kernel=sent.kernel,
        payload=sent.payload,
        counted=sent.counted,
        compared_at=at,
        loss=loss_after(outcome.steps, at),
        reference=loss_after(reference, at),
        by_time=None if in_time is None else loss_after(outcome.steps, in_time),
        steps_by_time=in_time,
    )
