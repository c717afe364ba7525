"""The launcher's part in the watch over its ranks: it leads, and reports on unresponsive ranks.

Made for ``paceline.launch.hang_watcher.HangWatcher``. On every machine a thread answers for
the machine's silent ranks; on the first one it also leads: looks at all ranks, judges, and tells
the console and the run's events. What is to be done about a hang is decided here by the clock alone
(see ``coordinator.is_due``) and done by the launcher's agent.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.events import Event, HangFound, HangOver, append
from paceline.events.wording import moving_again
from paceline.launch.background_errors import BackgroundErrors
from paceline.launch.hang_watcher import DetectedHang, StartedRanks
from paceline.untrusted import printable

if TYPE_CHECKING:
    from paceline.diagnose.hangs.coordinator import HangEnded
    from paceline.diagnose.hangs.diagnosis import HangDiagnosis
    from paceline.diagnose.hangs.rank_heartbeat_store import HeartbeatStore

Action = Literal["restart", "stop", "wait"]
_TICK_SECONDS = 0.3
_PATIENCE_TICKS = 2
"""Ticks that ranks get to answer for themselves."""


def to_stderr(message: str) -> None:
    """Show a finding on the console."""
    print(f"paceline: {printable(message)}", file=sys.stderr, flush=True)


class HangOverseer:
    """Watches the ranks of one launch for hangs.

    Findings are written to the events of the run in ``events_dir``, and said by ``say`` where
    nobody follows those. ``action`` is what happens to a run that stays stuck.
    """

    def __init__(
        self,
        *,
        action: Action = "wait",
        events_dir: Path | None = None,
        say: Callable[[str], None] | None = to_stderr,
    ) -> None:
        self._action, self._events_dir, self._say = action, events_dir, say
        self._stuck: DetectedHang | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def started(self, world: StartedRanks) -> None:
        """The ranks have been started: begin to watch them."""
        self._stuck = None
        self._end = threading.Event()
        if not world.ranks:
            return  # all of this machine's ranks stand by
        self._thread = threading.Thread(
            target=_Overseeing(self, world, self._end).run, name="paceline-oversee", daemon=True
        )
        self._thread.start()

    def look(self) -> DetectedHang | None:
        """Whether the ranks are stuck, for so long that something must be done."""
        return self._stuck

    def ended(self) -> None:
        """The ranks are gone."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None

    def tell(self, news: HangDiagnosis | HangEnded) -> None:
        """Pass on what was found, or that it is over."""
        from paceline.diagnose.hangs.diagnosis import HangDiagnosis

        event: Event
        if isinstance(news, HangDiagnosis):
            event = HangFound(
                step=news.step,
                seconds=news.seconds,
                what=news.what,
                ranks=list(news.ranks),
                summary=news.summary,
                detail=news.detail,
                action=self._action if news.seconds else "wait",
            )
            text = news.detail
        else:
            event = HangOver(step=news.step, seconds=news.seconds)
            text = moving_again(news.seconds)
        if self._events_dir is not None:
            append(self._events_dir, event)  # a full disk may be why the run stands still
        if self._say is not None:
            with contextlib.suppress(OSError, ValueError):
                self._say(text)

    def act_on(self, finding: HangDiagnosis) -> None:
        """Have the agent do something about it; it asks by ``look``."""
        if self._action != "wait":
            self._stuck = DetectedHang(
                action=self._action,
                summary=finding.summary,
                ranks=list(finding.ranks),
                step=finding.step,
            )


class _Overseeing:
    """The thread that watches one world."""

    def __init__(self, overseer: HangOverseer, world: StartedRanks, end: threading.Event) -> None:
        self._overseer, self._world, self._end = overseer, world, end
        self._asked_at = 0
        self._question = 0
        self._ticks = 0
        self._errors = BackgroundErrors("the watch for hangs")

    def run(self) -> None:
        """Until the ranks have ended, or their store has."""
        from paceline.diagnose.hangs.coordinator import Coordinator
        from paceline.diagnose.hangs.rank_heartbeat_store import HeartbeatStore, StoreGone

        world = self._world
        try:
            store = HeartbeatStore(world.address, world.port)
            leads = world.node == 0
            coordinator = Coordinator(store, world.world_size, tell=self._overseer.tell)
            while not self._end.wait(_TICK_SECONDS):
                self._ticks += 1
                if leads:
                    with self._errors.reported(but=(StoreGone,)):
                        store.show_lead(0, self._ticks)
                        coordinator.tick()
                        if (finding := coordinator.due()) is not None:
                            self._overseer.act_on(finding)
                with self._errors.reported(but=(StoreGone,)):
                    self._speak_for_silent_ranks(store)
        except StoreGone:
            return

    def _speak_for_silent_ranks(self, store: HeartbeatStore) -> None:
        from paceline.diagnose.hangs.unresponsive import answer_for_neighbours, started_here

        question = store.asked()
        if question > self._question:
            self._question, self._asked_at = question, self._ticks
        if self._asked_at and self._ticks - self._asked_at >= _PATIENCE_TICKS:
            self._asked_at = 0
            ranks = self._world.ranks
            answer_for_neighbours(store, question, list(ranks), started_here(ranks))
