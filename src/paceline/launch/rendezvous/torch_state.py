"""The state of torch's dynamic rendezvous, kept in the store as JSON.

Torch's own backend stores a pickle, and anyone who reaches the store could have every launcher
execute code. Here the state is written field by field and read back with every field checked; the
pickle that torch's handler wants to see is made in this process, from what was checked.

This is the one file that knows the private classes of
``torch.distributed.elastic.rendezvous.dynamic_rendezvous``; a test says when they change.

Imports torch at the top, so it is itself imported only when a rendezvous is about to start.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import Field
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from paceline.launch.messages import BadMessage, decode, encode

_NOTHING = "nothing yet"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_NODES = 100_000
Microseconds = Annotated[int, Field(ge=0, le=2**55)]
"""Since the epoch; the most that is taken is in the year 3111."""
Number = Annotated[int, Field(ge=0, le=2**62)]


@dataclass(frozen=True)
class RendezvousNode:
    """A launcher, as torch's rendezvous knows it."""

    addr: Annotated[str, Field(max_length=1000)]
    pid: Number
    local_id: Number


@dataclass(frozen=True)
class RendezvousState:
    """Torch's rendezvous state: participants and their ranks, who waits, the last heartbeats."""

    round: Number
    complete: bool
    deadline: Microseconds | None
    closed: bool
    participants: Annotated[list[tuple[RendezvousNode, Number]], Field(max_length=_MOST_NODES)]
    wait_list: Annotated[list[RendezvousNode], Field(max_length=_MOST_NODES)]
    redundancy_list: Annotated[list[RendezvousNode], Field(max_length=_MOST_NODES)]
    last_heartbeats: Annotated[
        list[tuple[RendezvousNode, Microseconds]], Field(max_length=_MOST_NODES)
    ]


def from_torch(state: Any) -> RendezvousState:
    """What is written down of torch's state; in one order, so that equal states are equal text."""
    return RendezvousState(
        round=state.round,
        complete=state.complete,
        deadline=None if state.deadline is None else _microseconds(state.deadline),
        closed=state.closed,
        participants=[(_node(n), rank) for n, rank in state.participants.items()],
        wait_list=[_node(n) for n in sorted(state.wait_list)],
        redundancy_list=[_node(n) for n in sorted(state.redundancy_list)],
        last_heartbeats=[(_node(n), _microseconds(t)) for n, t in state.last_heartbeats.items()],
    )


def to_torch(state: RendezvousState) -> Any:
    """Torch's state, made of what was written down."""
    made = _RendezvousState()
    made.round, made.complete, made.closed = state.round, state.complete, state.closed
    made.deadline = None if state.deadline is None else _time(state.deadline)
    made.participants = {_desc(node): rank for node, rank in state.participants}
    made.wait_list = {_desc(node) for node in state.wait_list}
    made.redundancy_list = {_desc(node) for node in state.redundancy_list}
    made.last_heartbeats = {_desc(node): _time(t) for node, t in state.last_heartbeats}
    return made


class JsonBackend(RendezvousBackend):
    """A backend for torch's dynamic rendezvous whose state is JSON under one key of ``store``.

    What is no valid state is replaced by an empty one, as if nobody had come yet, and reported to
    ``notice``.
    """

    def __init__(self, store: Store, run_id: str, notice: Callable[[str], None]) -> None:
        self._store, self._key, self._notice = store, f"rendezvous/{run_id}", notice
        # A store waits for a key that is not there: so it is, from the beginning.
        self._ask(lambda: store.compare_set(self._key, "", _NOTHING))

    @property
    def name(self) -> str:
        """A name for torch's records."""
        return "paceline-json"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state, as torch wants to see it, and what a later change refers to."""
        return self._read(self._ask(lambda: self._store.get(self._key)))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that ``token`` stands for; what it is then, and whether by us."""
        # A pickle that this process has made a moment ago, of an object of its own.
        text = encode(from_torch(pickle.loads(state)))
        before = token.decode() if isinstance(token, bytes) else _NOTHING
        found = self._ask(lambda: self._store.compare_set(self._key, before, text))
        read = self._read(found)
        return None if read is None else (*read, found == text.encode())

    def _read(self, text: bytes) -> tuple[bytes, Token] | None:
        if text == _NOTHING.encode():
            return None
        try:
            return pickle.dumps(to_torch(decode(RendezvousState, text))), text
        except BadMessage as error:
            self._notice(f"what stood in the rendezvous store was not a rendezvous: {error}")
            self._ask(lambda: self._store.set(self._key, _NOTHING))
            return None

    def _ask(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the rendezvous store does not answer") from error


def _node(node: Any) -> RendezvousNode:
    return RendezvousNode(node.addr, node.pid, node.local_id)


def _desc(node: RendezvousNode) -> Any:
    return _NodeDesc(node.addr, node.pid, node.local_id)


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
