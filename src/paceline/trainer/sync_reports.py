"""What a run tells of its wire: now and then the bytes that each rank has sent, as an event."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.events import Event, Note, WireUsed
from paceline.formatting import plural, size
from paceline.sync.traffic import LeftAlone, Traffic, left_alone
from paceline.world import collectives

EVERY = 50
_NOTABLE = 0.1
_NAMED = 3


class WireReports:
    """Every rank calls ``after`` after each step; now and then that is a collective.

    Replicas that train alone are not made to wait: they report when they meet.
    """

    def __init__(self, engine: Engine, report: Callable[[Event], None]) -> None:
        self._engine, self._report = engine, report
        self._inside = internals_of(engine)
        self._told_at: int | None = None
        self._told = Traffic(0, 0)
        self._looked_at_a_step = False

    def after(self, step: int) -> None:
        """``step`` is done, and nothing else since."""
        if self._told_at is None:
            self._told_at = step - 1
        what = self._inside.sync.sent_in(step)
        if what == "gradients" and not self._looked_at_a_step:
            self._looked_at_a_step = True
            self._tell_what_is_left_alone()
        # A report is of one kind of steps: the last one before another kind ends it.
        is_last = what != self._inside.sync.sent_in(step + 1)
        if (is_last or step - self._told_at >= EVERY) and not self._engine.in_round:
            self.finish()

    def finish(self) -> None:
        """Report what has not been reported yet."""
        step, now = self._engine.steps_done, self._engine.traffic()
        if now is None or self._told_at in (None, step) or self._engine.world.size == 1:
            return
        assert self._told_at is not None
        what = self._inside.sync.sent_in(step)
        if what is None:  # steps before the first round, of which nothing is counted
            self._told_at, self._told = step, now
            return
        new = Traffic(now.sent - self._told.sent, now.plain - self._told.plain)
        ranks = collectives.all_gather_object(new)
        self._report(
            WireUsed(
                step=step,
                steps=step - self._told_at,
                bytes_sent=[own.sent for own in ranks],
                bytes_plain=[own.plain for own in ranks],
                what=what,
            )
        )
        self._told_at, self._told = step, now

    def _tell_what_is_left_alone(self) -> None:
        """After the first step with compression: why the saving is small, where it is."""
        now = self._engine.traffic()
        if now is None or self._engine.world.size == 1:
            return
        new = Traffic(now.sent - self._told.sent, now.plain - self._told.plain)
        found, total = left_alone(self._inside.sync.averaging, self._inside.replica)
        message = left_alone_note(found, total, new)
        if message is not None:
            self._report(Note(message=message))


def left_alone_note(found: list[LeftAlone], total: int, step: Traffic) -> str | None:
    """What of one ``step`` is uncompressed, where that is a notable part of what was sent.

    ``found`` are the tensors that do, of ``total`` bytes in all.
    """
    left = sum(tensor.bytes for tensor in found)
    if not found or left == total:
        return None
    sent = step.plain * left / total
    if sent < _NOTABLE * step.sent:
        return None
    found = sorted(found, key=lambda tensor: -tensor.bytes)
    named = [tensor.name for tensor in found if tensor.bytes >= _NOTABLE * left][:_NAMED]
    others = len(found) - len(named)
    told = ", ".join(named)
    if others:
        told += f" and {plural(others, 'smaller tensor')}" if named else plural(others, "tensor")
    options = ", ".join(dict.fromkeys(tensor.why for tensor in found))
    return (
        f"of the {size(step.sent)} of gradients that a rank sends in a step, {size(round(sent))} "
        f"are uncompressed: {told} ({options})"
    )
