"""The rendezvous of the doctors of several machines: a TCPStore at ``HOST:PORT``, served by HOST.

Every question to the store is answered at once or waited for in short turns, so that Ctrl-C works
and one machine that goes away holds nobody up for long.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.doctor import facts
from paceline.doctor.facts_network import look_up
from paceline.doctor.links import connect
from paceline.errors import PacelineError
from paceline.launch.listening import is_this_machine
from paceline.launch.messages import BadMessage, decode
from paceline.launch.rendezvous.stores import IDENTITY, ServedStore, StoreUnreachable
from paceline.launch.secret import RunSecret
from paceline.launch.tunnel import Tunnel, WrongSecret

PREFIX = "paceline-doctor"
GREETING = f"{PREFIX}/here"
_STORE_TIMEOUT_S = 10.0
_PHASE_TIMEOUT_S = 60.0
_POLL_S = 0.05
_RETRY_S = 0.5


WhoServes = Callable[[str, int, dict[str, str]], str]


class RendezvousFailed(PacelineError):
    """The rendezvous failed; ``place`` says why, for the table."""

    def __init__(self, place: facts.RendezvousState, detail: str = "") -> None:
        self.place = place
        self.detail = detail
        super().__init__(detail or place)


class RendezvousLost(PacelineError):
    """The machine that serves the rendezvous has gone away."""


class NotADoctor(RendezvousLost):
    """What is in the store was not written by a doctor."""


class DoctorRendezvous:
    """One machine's part in the rendezvous. Machines are numbered in the order of arrival.

    ``left`` names those that went away, and the phase in which that was noticed. ``who_serves``
    tells which of several named keys the store at a host and port has; asked before this process
    connects to it, as torch waits without end for something else that listens there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        wait: float,
        who_serves: WhoServes,
        secret: RunSecret | None = None,
    ) -> None:
        self.endpoint = f"{host}:{port}"
        self._host, self._port = host, port
        self._tunnel = None if secret is None else Tunnel(secret)
        self._served: ServedStore | None = None
        self._deadline = time.monotonic() + wait
        self.serves = False
        self._open_store: Store | None = None
        try:
            self._open_store = self._open(who_serves)
        except BaseException:
            self.close()
            raise
        self.number = self._add("count", 1) - 1
        self.present: list[int] = []
        self.left: dict[int, str] = {}

    def gather(self, card: Any, most: int, kind: Any = Any) -> dict[int, Any]:
        """Introduce this machine, and wait for ``most`` machines, or until the time is up.

        The machine that serves the rendezvous decides who takes part, the same for all. Each card
        is of this ``kind``; ``RendezvousLost`` where one is not.
        """
        self._set(f"card/{self.number}", card)
        if self.serves:
            self._call_the_roll(most)
        while not self._has("roll"):
            if time.monotonic() > self._deadline + _STORE_TIMEOUT_S:
                raise RendezvousFailed(
                    "no answer", "the machine that serves the rendezvous does not answer"
                )
            time.sleep(_POLL_S)
        self.present = self._get("roll", list[int])
        if self.number not in self.present:
            raise RendezvousFailed(
                "too late", f"{len(self.present)} machines had begun without this one"
            )
        return {number: self._get(f"card/{number}", kind) for number in self.present}

    def exchange(
        self, phase: str, mine: Any, timeout: float = _PHASE_TIMEOUT_S, kind: Any = Any
    ) -> dict[int, Any]:
        """Give all machines what this one has, and get what each of them has, by number.

        Whoever is not heard of in time, or says something that is not of this ``kind``, is counted
        as having left.
        """
        self._set(f"{phase}/{self.number}", mine)
        deadline = time.monotonic() + timeout
        found = {}
        for number in [n for n in self.present if n not in self.left]:
            key = f"{phase}/{number}"
            while not self._has(key):
                if self._has(f"left/{number}") or time.monotonic() > deadline:
                    self.left[number] = phase
                    break
                time.sleep(_POLL_S)
            else:
                try:
                    found[number] = self._get(key, kind)
                except NotADoctor:
                    self.left[number] = phase
        return found

    def leave(self, *, early: bool = False) -> None:
        """Leave; the machine that serves the store stays until all others have left."""
        with contextlib.suppress(RendezvousLost):
            self._set(f"left/{self.number}", "early" if early else "done")
            deadline = time.monotonic() + _STORE_TIMEOUT_S
            others = [n for n in self.present if n not in self.left and n != self.number]
            while self.serves and not early and time.monotonic() < deadline:
                if all(self._has(f"left/{number}") for number in others):
                    break
                time.sleep(_POLL_S)
        self.close()

    def close(self) -> None:
        """Let go of the store; the machine that serves it closes its port with that."""
        self._open_store = None
        if self._served is not None:
            self._served.close()
            self._served = None
        if self._tunnel is not None:
            self._tunnel.close()

    @property
    def store_place(self) -> tuple[str, int]:
        """Where processes of this machine reach the store."""
        tunnel = self._tunnel
        where = self._host, self._port
        return where if tunnel is None else tunnel.reach(*where)

    # The store.

    @property
    def _store(self) -> Store:
        if self._open_store is None:
            raise RendezvousLost("this machine has left the rendezvous")
        return self._open_store

    def _call_the_roll(self, most: int) -> None:
        while (count := self._add("count", 0)) < most and time.monotonic() < self._deadline:
            time.sleep(_POLL_S)
        # A machine that has counted itself is about to post its card.
        present = [number for number in range(count) if self._appears(f"card/{number}")]
        self._set("roll", present[:most])

    def _appears(self, key: str) -> bool:
        deadline = time.monotonic() + 2
        while not self._has(key) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self._has(key)

    def _open(self, who_serves: WhoServes) -> Store:
        lookup = look_up([self._host])[0]
        if lookup.error:
            raise RendezvousFailed(
                "unresolved", f"the name {self._host!r} does not resolve: {lookup.error}"
            )
        if is_this_machine(self._host) and (served := self._serve()) is not None:
            self.serves, self._served = True, served
            served.store.set(GREETING, "here")
            return PrefixStore(PREFIX, served.store)
        self._knock()
        server_there = who_serves(*self.store_place, {"doctor": GREETING, "run": IDENTITY})
        if server_there != "doctor":
            what = "a run's rendezvous" if server_there == "run" else "something else than a doctor"
            raise RendezvousFailed("taken", f"{what} is at port {self._port} already")
        return PrefixStore(PREFIX, _store(*self.store_place))

    def _serve(self) -> ServedStore | None:
        """A store at this machine's port; ``None`` where another process has it."""
        try:
            return ServedStore(self._host, self._port, self._tunnel)
        except StoreUnreachable:
            return None

    def _knock(self) -> None:
        """Wait until something listens there; raise what connecting to it shows otherwise."""
        while True:
            connection, tried = connect(self._host, self._port)
            if connection is not None:
                connection.close()
                self._check_secret()
                return
            if time.monotonic() > self._deadline:
                place: facts.RendezvousState = "unreachable"
                if tried.outcome in ("no answer", "refused"):
                    place = tried.outcome
                raise RendezvousFailed(place, _knocking_in_words(place, tried.error))
            time.sleep(_RETRY_S)

    def _check_secret(self) -> None:
        if self._tunnel is None:
            return
        try:
            self._tunnel.probe(self._host, self._port, _STORE_TIMEOUT_S)
        except WrongSecret as error:
            raise RendezvousFailed("taken", str(error)) from None
        except OSError as error:
            raise RendezvousFailed("unreachable", str(error)) from None

    def _set(self, key: str, value: Any) -> None:
        with _telling():
            self._store.set(key, json.dumps(value))

    def _get(self, key: str, kind: Any) -> Any:
        with _telling():
            if not self._store.check([key]):  # or else it would be waited for
                raise NotADoctor(f"there is nothing under {key}")
            text = self._store.get(key)
        try:
            return decode(kind, text)
        except BadMessage as error:  # a stranger's: as good as no answer
            raise NotADoctor(
                f"what stands under {key} is no message of a doctor: {error}"
            ) from None

    def _has(self, key: str) -> bool:
        with _telling():
            return bool(self._store.check([key]))

    def _add(self, key: str, amount: int) -> int:
        with _telling():
            return int(self._store.add(key, amount))


@contextlib.contextmanager
def _telling() -> Any:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        raise RendezvousLost(f"the machine that serves the rendezvous is gone: {error}") from error


def _store(host: str, port: int) -> TCPStore:
    patience = timedelta(seconds=_STORE_TIMEOUT_S)
    return TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)


def _knocking_in_words(place: facts.RendezvousState, error: str) -> str:
    if place == "refused":
        return "nobody listens there (connection refused)"
    if place == "no answer":
        return "no answer (packets are dropped)"
    return error
