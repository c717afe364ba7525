"""Finding the rendezvous store among the candidate endpoints, and serving it when it is our turn.

Imports torch at the top, so it is itself imported only when a rendezvous is about to start.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from paceline.config.endpoints import Endpoint
from paceline.launch.listening import is_this_machine
from paceline.launch.messages import BadMessage
from paceline.launch.rendezvous.records import RendezvousRecords
from paceline.launch.rendezvous.stores import (
    ForeignStore,
    ServedStore,
    StoreRefused,
    StoreUnreachable,
    reach,
    serve_rendezvous,
)
from paceline.launch.tunnel import Tunnel

TURN_SECONDS = 5.0
"""How long each further candidate waits for those before it until it serves the store itself."""
_RETRY_SECONDS = 0.3


class RendezvousEndpoints:
    """The candidate endpoints of the rendezvous, in order, and the store served here, if any."""

    def __init__(
        self, endpoints: Sequence[Endpoint], patience: float, tunnel: Tunnel | None = None
    ) -> None:
        self._endpoints, self._patience, self._tunnel = list(endpoints), patience, tunnel
        self._server: ServedStore | None = None
        self._foreign: dict[Endpoint, ForeignStore] = {}
        self._served: Endpoint | None = None
        self._taken: Endpoint | None = None
        self.trouble: str | None = None
        """Why no rendezvous is found; ``None`` while one is, or before anybody looked."""

    def __str__(self) -> str:
        return ",".join(map(str, self._endpoints))

    @property
    def serves(self) -> bool:
        """Whether this launcher serves the rendezvous store."""
        return self._server is not None

    def look(self, *, settle: bool = True) -> RendezvousRecords | None:
        """The rendezvous that answers; of several, the one that knows the latest world.

        ``settle``: a store of our own that the others do not use is closed, so that nobody joins
        there by mistake.
        """
        found: list[tuple[int, int, Endpoint, RendezvousRecords]] = []
        for number, endpoint in enumerate(self._endpoints):
            try:
                records = RendezvousRecords(reach(endpoint, self._patience, self._tunnel))
                current = records.current()
            except ForeignStore as foreign:
                self._note_foreign(endpoint, foreign)
                continue
            except StoreRefused:
                self._foreign.pop(endpoint, None)
                continue
            except (StoreUnreachable, KeyError, BadMessage):
                continue
            self._foreign.pop(endpoint, None)
            found.append((-1 if current is None else current.round, -number, endpoint, records))
        if not found:
            return None
        *others, best = sorted(found, key=lambda entry: entry[:2])
        for *_, records in others:
            records.connection.close()
        if settle and best[2] != self._served:
            self.stop_serving()
        return best[3]

    def _note_foreign(self, endpoint: Endpoint, foreign: ForeignStore) -> None:
        """Remember why; that an answer came too late does not undo what was proved before."""
        known = self._foreign.get(endpoint)
        if known is None or foreign.proved or not known.proved:
            self._foreign[endpoint] = foreign

    def find(self, deadline: float, pause: Callable[[], None]) -> RendezvousRecords:
        """The rendezvous, waited for until ``deadline``; served here when it is our turn.

        The n-th candidate waits for n turns, so that an earlier one comes first.
        """
        began = time.monotonic()
        self.trouble = None
        while True:
            pause()
            if (records := self.look()) is not None:
                self.trouble = None
                return records
            now = time.monotonic()
            # Asked anew each time: a pod's own name may take some seconds to be known.
            own = [i for i, one in enumerate(self._endpoints) if is_this_machine(one.host)]
            if own and now - began >= TURN_SECONDS * own[0] and self._serve(own[0]):
                continue
            self.trouble = self._why_none()
            if now > deadline:
                raise StoreUnreachable(f"no rendezvous at {self} answers: {self.trouble}")
            time.sleep(_RETRY_SECONDS)

    def _why_none(self) -> str:
        """Why no rendezvous is found, as far as this machine can tell."""
        found = []
        for endpoint in self._endpoints:
            try:
                socket.getaddrinfo(endpoint.host, endpoint.port)
            except OSError:
                found.append(f"the name {endpoint.host!r} does not resolve")
                continue
            if endpoint in self._foreign:
                found.append(str(self._foreign[endpoint]))
            elif endpoint == self._taken:
                found.append(
                    f"port {endpoint.port} of this machine is taken by something that is no "
                    "rendezvous; choose another with --rdzv"
                )
            else:
                found.append(f"nothing answers at {endpoint} yet")
        return "; ".join(found)

    def stop_serving(self) -> None:
        """Close the store that this launcher serves."""
        if self._server is not None:
            self._server.close()
        self._server = self._served = None

    def _serve(self, number: int) -> bool:
        endpoint = self._endpoints[number]
        self.stop_serving()
        try:
            self._server = serve_rendezvous(endpoint.host, endpoint.port, self._tunnel)
        except StoreUnreachable:
            self._taken = endpoint  # maybe another launcher on this machine was faster
            return False
        self._served, self._taken = endpoint, None
        return True
