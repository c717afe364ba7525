"""Now and then: the bytes of gradients that each rank has sent, as an event."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine import Engine
from paceline.engine.traffic import Traffic
from paceline.events import Event, WireUsed
from paceline.world import collectives

EVERY = 50


class WireReports:
    """Every rank calls :meth:`after` after each step; now and then that is a collective.

    Replicas that train alone are not made to wait: they report when they meet.
    """

    def __init__(self, engine: Engine, report: Callable[[Event], None]) -> None:
        self._engine, self._report = engine, report
        self._told_at: int | None = None
        self._told = Traffic(0, 0)

    def after(self, step: int) -> None:
        """``step`` is done, and nothing else since."""
        if self._told_at is None:
            self._told_at = step - 1
        if step - self._told_at >= EVERY and not self._engine.in_round:
            self.finish()

    def finish(self) -> None:
        """Report what has not been reported yet."""
        step, now = self._engine.steps_done, self._engine.traffic()
        if now is None or self._told_at in (None, step) or self._engine.world.size == 1:
            return
        assert self._told_at is not None
        new = Traffic(now.sent - self._told.sent, now.plain - self._told.plain)
        ranks = collectives.all_gather_object(new)
        self._report(
            WireUsed(
                step=step,
                steps=step - self._told_at,
                bytes_sent=[own.sent for own in ranks],
                bytes_plain=[own.plain for own in ranks],
            )
        )
        self._told_at, self._told = step, now
