"""What the agent needs of a rendezvous, and the rendezvous of a single machine.

Each world that launchers form is a round, with a store of its own.

Imports torch at the top, so it is itself imported only when ranks are about to start.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.events import Event
from paceline.launch.rendezvous.stores import serve

_ADDRESS = "127.0.0.1"  # a name would have to be looked up


class WaitingStopped(RendezvousError):
    """``stop_waiting`` ended a ``next_rendezvous`` that waited for nodes."""


class LauncherRendezvous(RendezvousHandler):
    """Torch's rendezvous handler, and what else launchers exchange with each other.

    ``next_rendezvous`` returns the store of the round, fresh for each one and hosted by the
    launcher of node 0: its address and port are what ranks get as ``MASTER_ADDR`` and
    ``MASTER_PORT``, and the launchers of a round exchange messages in it, under the prefix
    of the store that is returned. It raises ``RendezvousClosedError``, whose text says who closed
    the run and why; ``RendezvousTimeoutError`` when too few nodes came; ``WaitingStopped``.

    Unless said otherwise, methods are called by the agent's thread and must return at once.
    """

    use_agent_store = True  # ranks use the store that a launcher hosts; none of them hosts one

    patience: float = 0.0
    """Seconds after which ``lost`` has reported a node that is gone, if one is."""

    @property
    @abc.abstractmethod
    def nodes(self) -> list[str]:
        """The host names of the current round, by node rank."""

    @abc.abstractmethod
    def lost(self) -> str | None:
        """Why the current round cannot go on, ``None`` while it can.

        A node sent no heartbeat for too long (its ranks are gone: ours are killed and the rest
        forms a new world), or somebody closed the run: then ``is_closed()`` is true, our ranks may
        save and leave, and the run is over.
        """

    @abc.abstractmethod
    def post(self, event: Event) -> None:
        """Add an event to the run's, written by the one launcher that writes them."""

    @abc.abstractmethod
    def leave(self, reason: str) -> None:
        """This node leaves for good, the others go on: called once its ranks are gone.

        ``reason`` is ``preempted`` or ``ended``, as in ``NodeLeft``. May
        take some seconds; an unreachable rendezvous is no error.
        """

    @abc.abstractmethod
    def close_for_all(self, reason: str) -> None:
        """The run is over on every node; ``reason`` is what the others get to read.

        May take some seconds; an unreachable rendezvous is no error.
        """

    @abc.abstractmethod
    def stop_waiting(self) -> None:
        """End a ``next_rendezvous`` that waits, now or later. Called by another thread."""


class LocalRendezvous(LauncherRendezvous):
    """The rendezvous of the ranks of one machine: a new store for every start.

    Torch's c10d rendezvous keeps one store over restarts, in which restarted Gloo ranks may find
    the addresses of their predecessors, and then wait for the dead (torch 2.11 to 2.13; a test
    says when that is over). Port 0 is any free one, so that launches never clash.
    """

    def __init__(self, host: str = "localhost", write: Callable[[Event], object] | None = None):
        self._host = host
        self._write = write
        self._run_id = f"paceline-{uuid.uuid4().hex}"
        self._closed = False

    @property
    def nodes(self) -> list[str]:
        """This machine is all there is."""
        return [self._host]

    def next_rendezvous(self) -> RendezvousInfo:
        """Node 0 of 1."""
        store = serve(_ADDRESS, 0)
        store_info = RendezvousStoreInfo(_ADDRESS, store.port)
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, store_info)

    def num_nodes_waiting(self) -> int:
        """No other machine ever asks to join."""
        return 0

    def lost(self) -> str | None:
        """There is no other node to lose."""
        return None

    def post(self, event: Event) -> None:
        """Write the event, where the run has events."""
        if self._write is not None:
            self._write(event)

    def leave(self, reason: str) -> None:
        """Nobody stays behind."""

    def close_for_all(self, reason: str) -> None:
        """There is nobody else to notify."""
        self._closed = True

    def stop_waiting(self) -> None:
        """It never waits."""

    def get_backend(self) -> str:
        """A name for the agent's records."""
        return "local"

    def get_run_id(self) -> str:
        """A unique id of the launch."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether the launch is over."""
        return self._closed

    def set_closed(self) -> None:
        """The launch is over."""
        self._closed = True

    def shutdown(self) -> bool:
        """Nothing to close: a store ends with its last user."""
        self._closed = True
        return True
