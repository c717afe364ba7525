"""The watch over one rank: a thread that reports where the rank is, when it moves and when not.

Every second or so it leaves a heartbeat in the store; when a report is asked for it adds the
latest collectives and the Python stack of the training thread. It holds no lock of the training
thread's and talks to the store over a connection of its own, so that it can neither be held up by a
rank that hangs nor hold one up. If the store goes away, the watch ends.

Somebody has to lead: look at all heartbeats, ask for reports and diagnose. Under Paceline's
launcher, that is the launcher (see ``oversee``). Elsewhere it is the first rank to claim it; if
that one falls silent, another takes over.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass

from paceline.diagnose.hangs import explain, flight_recorder, mismatch, stacks, unresponsive
from paceline.diagnose.hangs.coordinator import Coordinator, HangEnded
from paceline.diagnose.hangs.diagnosis import HangDiagnosis
from paceline.diagnose.hangs.rank_heartbeat import (
    Call,
    GroupKey,
    Heartbeat,
    PointToPoint,
    RankReport,
)
from paceline.diagnose.hangs.rank_heartbeat_store import HeartbeatStore, StoreGone
from paceline.diagnose.pulse import OUTSIDE, PHASES, Pulse
from paceline.events.wording import moving_again
from paceline.launch import error_report
from paceline.launch.background_errors import BackgroundErrors
from paceline.untrusted import printable

AFTER_VARIABLE = "PACELINE_HANG_AFTER"
DEFAULT_AFTER = 60.0
_CALLS_TOLD = 64
"""Collectives of each group that a report names."""
_LEADERLESS_SECONDS = 5.0
# In these a rank is at work on a step. Between steps a program may take its time, unless another
# rank waits for it.
_PACED = tuple(phase for phase in PHASES if phase != "other")


def chosen_after(asked: float | None) -> float:
    """Seconds without movement that count as a hang: what was asked, the environment, 60. 0: off.

    A launcher passes on what its user chose by ``PACELINE_HANG_AFTER``.
    """
    if asked is not None:
        return asked
    return float(os.environ.get(AFTER_VARIABLE, DEFAULT_AFTER))


def interval(after: float) -> float:
    """Seconds between two heartbeats: often enough to keep a promise of ``after`` seconds."""
    return min(2.0, max(0.2, after / 12))


@dataclass(frozen=True)
class WatchedRank:
    """Which rank is watched, and where its world meets."""

    rank: int
    size: int
    address: str
    port: int
    world: tuple[int, int]


class Watch:
    """Watches this process's rank until ``stop``."""

    def __init__(self, member: WatchedRank, pulse: Pulse, after: float) -> None:
        self._member, self._pulse, self._after = member, pulse, after
        self._pid = os.getpid()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._host = socket.gethostname()
        self._store: HeartbeatStore  # this thread's alone, once it runs
        self._beats = 0
        self._progress: tuple[int, int] = (-1, -1)
        self._moved_at = time.monotonic()
        self._answered = 0
        self._digested: dict[GroupKey, int] = {}
        self._digest_at = 0.0
        self._lead = _Lead(member, after, self._end)

    def start(self) -> None:
        """Begin. The first heartbeat is left at once: the rank may be stuck before a second."""
        try:
            self._store = HeartbeatStore(self._member.address, self._member.port)
            self._answered = self._store.asked()
            self._store.post_beat(self._beat())
        except StoreGone:
            return  # nobody to tell
        self._thread.start()
        error_report.add_context(self.last_words)

    def stop(self) -> None:
        """Tell the others that this rank leaves, and end. A forked child has no thread to end."""
        if self._pid != os.getpid():
            return
        error_report.remove_context(self.last_words)
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def last_words(self) -> str:
        """Where this rank is, and which others are gone: for the error that ends it.

        Called by the training thread: over a connection of its own, and only while there is a
        store to ask.
        """
        groups = flight_recorder.group_progress()
        calls = {(c.key, c.number): c for c in flight_recorder.calls()}
        last = [calls[p.key, p.begun] for p in groups if (p.key, p.begun) in calls]
        lost = []
        if self._thread.is_alive():
            ranks = set(range(self._member.size)) - {self._member.rank}
            beats = HeartbeatStore(self._member.address, self._member.port).beats(ranks).values()
            near = [b for b in beats if b.host == self._host and b.world == self._member.world]
            # Looked at, not signalled: that a process is gone is seen by its number alone.
            lost = [unresponsive.report_on(beat, beat.pid, stack=False) for beat in near]
        return explain.last_words(last, lost)

    def _run(self) -> None:
        store, errors = self._store, BackgroundErrors("the watch over this rank")
        try:
            while not self._end.wait(interval(self._after)):
                with errors.reported(but=(StoreGone,)):
                    self._tick(store)
            store.post_beat(self._beat(left=True))
        except StoreGone:
            return  # whoever kept the store is gone; the run will notice without us

    def _tick(self, store: HeartbeatStore) -> None:
        store.post_beat(self._beat())
        self._post_digest(store)
        question = store.asked()
        if question > self._answered:
            self._answered = question
            store.answer(question, self._report())
        self._lead.tick(store, question)

    def _beat(self, *, left: bool = False) -> Heartbeat:
        stacks.prepare_stack_file()
        pulse, groups = self._pulse, flight_recorder.group_progress()
        now = time.monotonic()
        beat = Heartbeat(
            rank=self._member.rank,
            world=self._member.world,
            number=self._beats,
            host=self._host,
            pid=self._pid,
            after=self._after,
            still=0.0,
            moves=pulse.moves,
            step=self._step,
            phase=pulse.phase,
            paced=pulse.phase in _PACED,
            longest_step=pulse.longest_step,
            left=left,
            main_thread=threading.main_thread().ident or 0,
            groups=groups,
        )
        self._beats += 1
        if beat.progress != self._progress:
            self._progress, self._moved_at = beat.progress, now
        still = now - self._moved_at
        # Gloo's messages are not on record: where nothing moves, the stack tells of one.
        in_message = still > self._after / 2 and _message() is not None
        return dataclasses.replace(beat, still=still, in_message=in_message)

    @property
    def _step(self) -> int | None:
        """Steps done; ``None`` where no engine counts them."""
        pulse = self._pulse
        return None if pulse.step == 0 and pulse.phase == OUTSIDE else pulse.step

    def _report(self) -> RankReport:
        """Everything about this rank. The stack first: it is what may still change."""
        stack, message = stacks.main_stack()
        message = message or flight_recorder.open_message()
        beat = self._beat()
        latest: dict[GroupKey, list[Call]] = {}
        for call in flight_recorder.calls():
            latest.setdefault(call.key, []).append(call)
        return beat.report(
            calls=tuple(c for calls in latest.values() for c in calls[-_CALLS_TOLD:]),
            message=message,
            stack=stack,
            kernel=unresponsive.kernel_function(self._pid),
            disk=unresponsive.main_thread_state(self._pid) == "D",
        )

    def _post_digest(self, store: HeartbeatStore) -> None:
        """Now and then: what was called since the last time. Reading it all costs milliseconds."""
        now = time.monotonic()
        if now < self._digest_at:
            return
        self._digest_at = now + min(5.0, max(1.0, self._after / 4))
        calls = flight_recorder.calls()
        store.post_digest(self._member.rank, mismatch.digest(calls, self._digested))
        for call in calls:
            self._digested[call.key] = max(call.number, self._digested.get(call.key, 0))


def _message() -> PointToPoint | None:
    """The message that the training thread waits for, or that its GPU does."""
    return stacks.main_stack()[1] or flight_recorder.open_message()


class _Lead:
    """Leads where nobody else does: ranks started by torchrun have no launcher of ours."""

    def __init__(self, member: WatchedRank, after: float, end: threading.Event) -> None:
        self._member, self._after, self._end = member, after, end
        self._seen: tuple[int, int] = (0, 0)
        self._seen_at = time.monotonic()
        self._term = 0
        self._count = 0
        self._coordinator: Coordinator | None = None
        self._spoke_for = 0

    def tick(self, store: HeartbeatStore, question: int) -> None:
        """Lead if this rank does; claim it if nobody has for a while."""
        leader = store.leader()
        now = time.monotonic()
        if leader != self._seen:
            self._seen, self._seen_at = leader, now
        if self._coordinator is not None and leader[0] == self._term:
            self._go_on(store)
        elif now - self._seen_at > _LEADERLESS_SECONDS:
            self._seen_at = now  # whoever loses the claim waits for the winner
            if store.claim_lead(leader[0] + 1):
                self._term = leader[0] + 1
                self._coordinator = Coordinator(store, self._member.size, tell=_print)
                self._go_on(store)
        if leader[0] > 0 and self._spoke_for < question:
            # No launcher of ours on this machine: ranks speak for their silent neighbours.
            self._spoke_for = question
            self._speak_later(question)

    def _go_on(self, store: HeartbeatStore) -> None:
        assert self._coordinator is not None
        self._count += 1
        store.show_lead(self._term, self._count)
        self._coordinator.tick()

    def _speak_later(self, question: int) -> None:
        """After giving them the time to answer for themselves; in a thread of its own."""
        member, patience = self._member, 2 * interval(self._after)

        def speak() -> None:
            if self._end.wait(patience):
                return
            try:
                store = HeartbeatStore(member.address, member.port)
                with BackgroundErrors("the watch over this rank").reported(but=(StoreGone,)):
                    unresponsive.answer_for_neighbours(
                        store, question, range(member.size), unresponsive.sibling
                    )
            except StoreGone:
                return

        threading.Thread(target=speak, name="paceline-stand-in", daemon=True).start()


def _print(news: HangDiagnosis | HangEnded) -> None:
    text = news.detail if isinstance(news, HangDiagnosis) else moving_again(news.seconds)
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)
