"""Following a run on all its hosts: output, signals, lost connections, hosts that come back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.formatting import plural
from paceline.launch.engines.ssh.preflight import Placement, RemoteHost
from paceline.launch.engines.ssh.session import ConnectionLost, HostRefused, RemoteSession
from paceline.launch.exit_codes import INTERRUPTED, TOLD_TO_LEAVE
from paceline.launch.signals import LauncherSignals

_BEAT_SECONDS = 2.0
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 12.0
_SECONDS_AFTER_GRACE = 25.0
_SECONDS_TO_KILL = 5.0
_SECONDS_AFTER_FINISH = 120.0
_SECONDS_TO_CLEAN = 30.0
_RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 15.0)
_QUICK_SECONDS = 60.0
_MOST_QUICK_DEATHS = 3
KILLED = 128 + 9
_MACHINE_LEFT = (None, KILLED, TOLD_TO_LEAVE)
"""How a launcher ends that was killed, or whose machine is taken away: it may come back."""


@dataclass(frozen=True)
class LauncherOrder:
    """What a host is asked to start, but for what differs between hosts and starts."""

    command: Callable[[str, str], list[str]]
    """The launcher's command, given the Python and the secret's file of a host."""
    secret: str | None
    setup: str | None
    linger: float
    grace: float

    def request(self, host: RemoteHost, placement: Placement, start: int) -> dict[str, Any]:
        """The request by which a host starts its launcher."""
        control = f"{host.folder}/host{host.number}-{start}"
        return {
            "do": "start",
            "control": control,
            "command": self.command(str(host.facts["python"]), f"{control}/secret"),
            "cwd": placement.work,
            "make": None if placement.shared_run else str(placement.run.parent),
            "secret": self.secret,
            "setup": self.setup,
            "linger": self.linger,
            "grace": self.grace,
            "patience": self.patience,
        }

    @property
    def patience(self) -> float:
        """Seconds that the other end of a connection waits to hear of us."""
        return self.linger + _SECONDS_TO_CLEAN


class HostFollower:
    """The launcher of one host, in a thread: started, followed, started again."""

    def __init__(
        self,
        host: RemoteHost,
        placement: Placement,
        order: LauncherOrder,
        show: Callable[[RemoteHost, str], None],
        stamp: int,
    ) -> None:
        self.host = host
        self.code: int | None = None
        self.ended = False
        """Whether it will do nothing more."""
        self._placement, self._order, self._show = placement, order, show
        self._stop = threading.Event()
        self._first = self._start = stamp
        self._started_at = 0.0
        self._control: str | None = None
        self._offset = 0
        self._session: RemoteSession | None = host.session
        self._quick_deaths = 0
        self.thread = threading.Thread(target=self._work, daemon=True)

    @property
    def was_reached(self) -> bool:
        """Whether the end of its last launcher is known."""
        return self._control is None

    @property
    def is_running(self) -> bool:
        """Whether its launcher runs, as far as is known."""
        return not self.ended and self._control is not None

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard of the host for a while."""
        session = self._session
        return session is None or time.monotonic() - session.heard_at > _SILENT_SECONDS

    def tell(self, request: dict[str, Any]) -> None:
        """Send something to the host, if there is a connection."""
        session = self._session
        if session is not None:
            with contextlib.suppress(ConnectionLost):
                session.tell(request)

    def give_up(self) -> None:
        """Start nothing any more, and connect no more; what runs is followed to its end."""
        self._stop.set()

    def close(self) -> None:
        """End the connection and the thread."""
        self.give_up()
        if self._session is not None:
            self._session.close()
        self.thread.join(10)

    def clean(self) -> None:
        """Have the host remove what was there for the run only."""
        if self._session is None or not self.host.facts:
            return
        folder = self.host.folder
        paths = [f"{folder}/host{self.host.number}-{n}" for n in range(self._first, self._start)]
        code = [] if self._placement.code is None else [self._placement.code]
        with contextlib.suppress(ConnectionLost):
            request = {"do": "clean", "paths": [*paths, *code], "folder": folder}
            self._session.ask(request, seconds=20)

    def collect(self) -> dict[str, Any] | None:
        """The small files of the run on this host."""
        if self._session is None:
            return None
        with contextlib.suppress(ConnectionLost):
            request = {"do": "collect", "path": str(self._placement.run)}
            return self._session.ask(request, seconds=120)
        return None

    # ------------------------------------------------------------- in the thread

    def _work(self) -> None:
        try:
            self._until_ended()
        except Exception as error:  # of an answer that is none: this thread must not just vanish
            self._show(self.host, f"cannot be followed any more: {error!r}")
            self.code = 1
        finally:
            self.ended = True

    def _until_ended(self) -> None:
        tries = 0
        while not self.ended:
            try:
                if self._session is None:
                    self._session = RemoteSession(self.host.command, self._take_output)
                answer = self._follow(self._session)
                tries = 0
                self._ended_with(answer)
            except (ConnectionLost, PacelineError) as error:
                if self._session is not None:
                    self._session.close()
                    self._session = None
                self._lost(str(error), tries)
                tries += 1
                self.ended = self._stop.wait(_RETRY_SECONDS[min(tries, len(_RETRY_SECONDS)) - 1])

    def _follow(self, session: RemoteSession) -> dict[str, Any]:
        session.redirect(self._take_output)
        if self._control is not None:
            again = {"do": "follow", "control": self._control, "offset": self._offset}
            session.tell({**again, "patience": self._order.patience})
        else:
            if self._start > self._first or not self.host.facts:
                self._placement.deliver(self.host, session)
            request = self._order.request(self.host, self._placement, self._start)
            self._start += 1
            self._offset, self._control = 0, str(request["control"])
            self._started_at = time.monotonic()
            session.tell(request)
        try:
            return session.answer()
        except HostRefused as error:
            return {"exit": None, "why": str(error)}

    def _ended_with(self, answer: dict[str, Any]) -> None:
        code, why = answer.get("exit"), str(answer.get("why") or "")
        self._control = None
        if code not in _MACHINE_LEFT or self._stop.is_set():
            self.code, self.ended = code, True
            return
        is_quick = time.monotonic() - self._started_at < _QUICK_SECONDS
        self._quick_deaths = self._quick_deaths + 1 if is_quick else 0
        how = why or ("was killed" if code == KILLED else "was told to leave")
        if self._quick_deaths >= _MOST_QUICK_DEATHS:
            times = f"{self._quick_deaths} times in a row"
            self._show(self.host, f"its launcher ended {times} ({how}); it is not started again")
            self.code, self.ended = KILLED if code is None else code, True
            return
        self._show(self.host, f"its launcher ended ({how}); it is started again")
        self.ended = self._stop.wait(_RETRY_SECONDS[self._quick_deaths])

    def _lost(self, why: str, tries: int) -> None:
        if tries == 0:
            parts = [f"no connection: {why}"]
            if self._control is not None:
                parts.append(f"its launcher goes on for {self._order.linger:g} s without it")
            if not self._stop.is_set():
                parts.append("trying again")
            self._show(self.host, "; ".join(parts))

    def _take_output(self, text: str, offset: int) -> None:
        self._offset = offset
        for line in text.splitlines():
            self._show(self.host, line)


class Supervisor:
    """All hosts of a run, until it has ended on all of them."""

    def __init__(
        self,
        followers: Sequence[HostFollower],
        least: int,
        grace: float,
        patience: float,
        say: Callable[[str], None],
        linger: float,
    ) -> None:
        self._followers, self._least = followers, least
        self._grace, self._patience, self._linger = grace, patience, linger
        self._say = say
        self._ending_since: float | None = None
        self._killed_at: float | None = None
        self._beaten_at = 0.0
        self._heard_at = time.monotonic()
        self._finished_at: float | None = None

    def run(self) -> int:
        """Follow the run; the exit status of the command."""
        with LauncherSignals() as signals:
            for follower in self._followers:
                follower.thread.start()
            while not self._is_over():
                time.sleep(_POLL_SECONDS)
                self._beat()
                self._mind_signals(signals)
                self._mind_hosts()
            left = [str(f.host) for f in self._followers if not f.ended]
            if left:
                self._say(
                    f"{', '.join(left)} did not answer; what runs there ends by itself, "
                    f"{self._linger:g} s after it heard of this command last"
                )
            return self._status(signals)

    def _is_over(self) -> bool:
        waited_for = [f for f in self._followers if not f.ended]
        if not waited_for:
            return True
        if self._ending_since is None:
            return False
        now = time.monotonic()
        if self._killed_at is not None and now - self._killed_at > _SECONDS_TO_KILL:
            return True
        if now - self._ending_since > self._grace + _SECONDS_AFTER_GRACE:
            return True
        return all(follower.is_silent for follower in waited_for)

    def _beat(self) -> None:
        if time.monotonic() - self._beaten_at > _BEAT_SECONDS:
            self._beaten_at = time.monotonic()
            for follower in self._followers:
                follower.tell({"do": "beat"})

    def _mind_signals(self, signals: LauncherSignals) -> None:
        if signals.first is not None and self._ending_since is None:
            self._say("ending the run on all hosts; a second Ctrl-C kills it")
            self._end()
        if signals.insisted and self._killed_at is None:
            self._killed_at = time.monotonic()
            self._order("kill")

    def _mind_hosts(self) -> None:
        """A run that is over somewhere is over; one that has too few hosts left is ended."""
        if self._ending_since is not None:
            return
        now = time.monotonic()
        if any(f.ended and f.code == 0 for f in self._followers):
            self._no_more_starts()
            self._finished_at = self._finished_at or now
            if now - self._finished_at > _SECONDS_AFTER_FINISH:
                self._end()
            return
        if any(f.ended and f.code == INTERRUPTED for f in self._followers):
            self._end()
            return
        left = [f for f in self._followers if not f.ended]
        if len(left) < self._least:
            if left:
                self._say(f"{plural(len(left), 'host')} of at least {self._least} left: ending it")
            self._end()
        elif not all(f.is_silent for f in left):
            self._heard_at = now
        elif now - self._heard_at > self._patience:
            self._say(f"no host was heard of for {self._patience:g} s (launch.rejoin_timeout)")
            self._end()

    def _no_more_starts(self) -> None:
        for follower in self._followers:
            follower.give_up()

    def _end(self) -> None:
        self._ending_since = time.monotonic()
        self._no_more_starts()
        self._order("int")

    def _order(self, what: str) -> None:
        for follower in self._followers:
            if follower.is_running:
                follower.tell({"do": "order", "what": what})

    def _status(self, signals: LauncherSignals) -> int:
        codes = [f.code for f in self._followers if f.code is not None]
        if 0 in codes:
            return 0
        if signals.first is not None:
            return 128 + signals.first
        return next((code for code in codes if code not in _MACHINE_LEFT), None) or (
            codes[0] if codes else 1
        )
