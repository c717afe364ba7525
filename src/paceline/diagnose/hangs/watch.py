"""The watch over one rank: a thread that tells where the rank is, when it moves and when not.

Every second or so it leaves a sign of life on the board; when a report is asked for it adds the
latest collectives and the Python stack of the training thread. It holds no lock of the training
thread's and talks to the store over a connection of its own, so that it can neither be held up by a
rank that hangs nor hold one up. If the store goes away, the watch ends.

Somebody has to lead: to look at all signs of life, ask and judge. Under Paceline's launcher the
launcher does (see ``oversee``). Elsewhere the first rank to claim it does, and if that one falls
silent another takes over.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass

from paceline.diagnose.hangs import explain, flight, mismatch, stacks, stand_in
from paceline.diagnose.hangs.board import Board, BoardGone
from paceline.diagnose.hangs.coordinator import Coordinator, Over
from paceline.diagnose.hangs.report import Beat, Call, GroupKey, Report
from paceline.diagnose.hangs.verdict import Finding
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
    """Seconds between two signs of life: often enough to keep a promise of ``after`` seconds."""
    return min(2.0, max(0.2, after / 12))


@dataclass(frozen=True)
class Member:
    """Which rank is watched, and where its world meets."""

    rank: int
    size: int
    address: str
    port: int
    world: tuple[int, int]


class Watch:
    """Watches this process's rank until :meth:`stop`."""

    def __init__(self, member: Member, pulse: Pulse, after: float) -> None:
        self._member, self._pulse, self._after = member, pulse, after
        self._pid = os.getpid()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._host = socket.gethostname()
        self._board: Board  # this thread's alone, once it runs
        self._beats = 0
        self._progress: tuple[int, int] = (-1, -1)
        self._moved_at = time.monotonic()
        self._answered = 0
        self._digested: dict[GroupKey, int] = {}
        self._digest_at = 0.0
        self._lead = _Lead(self)

    def start(self) -> None:
        """Begin. The first sign of life is left at once: the rank may be stuck before a second."""
        try:
            self._board = Board(self._member.address, self._member.port)
            self._answered = self._board.asked()
            self._board.post_beat(self._beat())
        except BoardGone:
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
        board to ask.
        """
        places = flight.places()
        calls = {(c.key, c.number): c for c in flight.calls()}
        last = [calls[p.key, p.begun] for p in places if (p.key, p.begun) in calls]
        lost = []
        if self._thread.is_alive():
            ranks = set(range(self._member.size)) - {self._member.rank}
            beats = Board(self._member.address, self._member.port).beats(ranks).values()
            near = [b for b in beats if b.host == self._host and b.world == self._member.world]
            # Looked at, not signalled: that a process is gone is seen by its number alone.
            lost = [stand_in.report_on(beat, beat.pid, stack=False) for beat in near]
        return explain.last_words(last, lost)

    def _run(self) -> None:
        board, errors = self._board, BackgroundErrors("the watch over this rank")
        try:
            while not self._end.wait(interval(self._after)):
                with errors.reported(but=(BoardGone,)):
                    self._tick(board)
            board.post_beat(self._beat(left=True))
        except BoardGone:
            return  # whoever kept the board is gone; the run will notice without us

    def _tick(self, board: Board) -> None:
        board.post_beat(self._beat())
        self._post_digest(board)
        question = board.asked()
        if question > self._answered:
            self._answered = question
            board.answer(question, self._report())
        self._lead.tick(board, question)

    def _beat(self, *, left: bool = False) -> Beat:
        stacks.prepare_stack_file()
        pulse, places = self._pulse, flight.places()
        now = time.monotonic()
        beat = Beat(
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
            places=places,
        )
        self._beats += 1
        if beat.progress != self._progress:
            self._progress, self._moved_at = beat.progress, now
        still = now - self._moved_at
        # Messages are not on record: where nothing moves, the stack tells whether it is one.
        in_message = still > self._after / 2 and stacks.main_stack()[1] is not None
        return dataclasses.replace(beat, still=still, in_message=in_message)

    @property
    def _step(self) -> int | None:
        """Steps done; ``None`` where no engine counts them."""
        pulse = self._pulse
        return None if pulse.step == 0 and pulse.phase == OUTSIDE else pulse.step

    def _report(self) -> Report:
        """Everything about this rank. The stack first: it is what may still change."""
        stack, message = stacks.main_stack()
        beat = self._beat()
        latest: dict[GroupKey, list[Call]] = {}
        for call in flight.calls():
            latest.setdefault(call.key, []).append(call)
        return beat.report(
            calls=tuple(c for calls in latest.values() for c in calls[-_CALLS_TOLD:]),
            message=message,
            stack=stack,
            kernel=stand_in.kernel_function(self._pid),
            disk=stand_in.main_thread_state(self._pid) == "D",
        )

    def _post_digest(self, board: Board) -> None:
        """Now and then: what was called since the last time. Reading it all costs milliseconds."""
        now = time.monotonic()
        if now < self._digest_at:
            return
        self._digest_at = now + min(5.0, max(1.0, self._after / 4))
        calls = flight.calls()
        board.post_digest(self._member.rank, mismatch.digest(calls, self._digested))
        for call in calls:
            self._digested[call.key] = max(call.number, self._digested.get(call.key, 0))


class _Lead:
    """Leads where nobody else does: ranks started by torchrun have no launcher of ours."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: tuple[int, int] = (0, 0)
        self._seen_at = time.monotonic()
        self._term = 0
        self._count = 0
        self._coordinator: Coordinator | None = None
        self._spoke_for = 0

    def tick(self, board: Board, question: int) -> None:
        """Lead if this rank does; claim it if nobody has for a while."""
        member = self._watch._member
        leader = board.leader()
        now = time.monotonic()
        if leader != self._seen:
            self._seen, self._seen_at = leader, now
        if self._coordinator is not None and leader[0] == self._term:
            self._go_on(board)
        elif now - self._seen_at > _LEADERLESS_SECONDS:
            self._seen_at = now  # whoever loses the claim waits for the winner
            if board.claim_lead(leader[0] + 1):
                self._term = leader[0] + 1
                self._coordinator = Coordinator(board, member.size, tell=_print)
                self._go_on(board)
        if leader[0] > 0 and self._spoke_for < question:
            # No launcher of ours on this machine: ranks speak for their silent neighbours.
            self._spoke_for = question
            self._speak_later(question)

    def _go_on(self, board: Board) -> None:
        assert self._coordinator is not None
        self._count += 1
        board.show_lead(self._term, self._count)
        self._coordinator.tick()

    def _speak_later(self, question: int) -> None:
        """After giving them the time to answer for themselves; in a thread of its own."""
        member = self._watch._member
        patience = 2 * interval(self._watch._after)

        def speak() -> None:
            if self._watch._end.wait(patience):
                return
            try:
                board = Board(member.address, member.port)
                with BackgroundErrors("the watch over this rank").reported(but=(BoardGone,)):
                    stand_in.answer_for_neighbours(
                        board, question, range(member.size), stand_in.sibling
                    )
            except BoardGone:
                return

        threading.Thread(target=speak, name="paceline-stand-in", daemon=True).start()


def _print(news: Finding | Over) -> None:
    text = news.detail if isinstance(news, Finding) else moving_again(news.seconds)
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)
