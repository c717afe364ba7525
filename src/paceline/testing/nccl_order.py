"""Would this hang over NCCL? Found on CPU ranks, from the order in which they communicate.

Over Gloo every call stands for itself. Over NCCL, calls of one communicator run one after the other
in the order in which a rank issued them, and calls of several communicators may have to: kernels
that wait for their peers occupy the GPU. So a run is safe where its ranks could do all calls of a
thread strictly one after the other, each waiting until all its peers have come to theirs. That is
what ``find_deadlock`` tries out, on what ``CommunicationRecord`` has noted:

    def job():
        with CommunicationRecord() as record:
            ...  # train
            return record.issued()

    assert find_deadlock(run_ranks(job, world_size=4)) is None

Messages are noted by Paceline, collectives by torch's flight recorder, those of DDP, FSDP and
DTensor included, which remembers some 2,000 of them: more, if ``TORCH_FR_BUFFER_SIZE`` says so
before the first process group is made.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline.diagnose.hangs import flight_recorder
from paceline.diagnose.hangs.rank_heartbeat import Call
from paceline.launch.environment import FLIGHT_RECORDER

_MESSAGES = ("isend", "irecv", "send", "recv")
_SAME_SIZE = ("all_reduce", "allreduce", "broadcast")
_THREAD_RUNS = re.compile(r"/threading\.py:\d+ in run$")
_OWN = os.path.join("paceline", "testing", "nccl_order.py")
_REMEMBERED = 2000
"""Collectives that torch remembers where nobody says how many."""


@dataclass(frozen=True)
class Message:
    """One side of a message: ``send`` or ``recv``, the group, and the peer's rank in the world."""

    op: str
    group: str
    peer: int


@dataclass(frozen=True)
class Issued:
    """What a thread issued at once: a collective, or the messages of a batch."""

    thread: str
    """Where its thread began; empty for the main thread, and for autograd's, which it waits for."""
    where: str
    call: Call | None = None
    messages: tuple[Message, ...] = ()

    def __str__(self) -> str:
        if self.call is not None:
            shapes = ", ".join(map(str, map(list, self.call.shapes)))
            what = f"{self.call.op} {shapes} of ranks {list(self.call.ranks)}"
        else:
            words = {"send": "to", "recv": "from"}
            what = " and ".join(f"{m.op} {words[m.op]} rank {m.peer}" for m in self.messages)
        return f"{what} ({self.where})"


class CommunicationRecord:
    """Notes what this rank sends and receives from ``__enter__`` on."""

    def __init__(self) -> None:
        self._since = 0
        self._noted: list[tuple[int, Issued]] = []
        self._batch = threading.local()
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> CommunicationRecord:
        self._since = time.time_ns()
        for name in _MESSAGES:
            self._replace(name, self._noting_one)
        self._replace("batch_isend_irecv", self._noting_batch)
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, original)

    def issued(self) -> list[Issued]:
        """What was issued so far, in order; to be called while the groups are there."""
        calls = flight_recorder.issued_calls(self._since)
        if len(calls) >= int(os.environ.get(FLIGHT_RECORDER) or _REMEMBERED):
            raise RuntimeError(
                f"torch remembers {len(calls)} collectives, and there may have been more. Record "
                f"less, or set {FLIGHT_RECORDER} before the first process group is made."
            )
        found = [
            (c.time, Issued(_thread(c.where), _told(c.where), c.call))
            for c in calls
            if c.call.ranks
        ]
        return [each for _, each in sorted(found + self._noted, key=lambda pair: pair[0])]

    def _replace(self, name: str, make: Callable[[str, Any], Any]) -> None:
        self._originals[name] = getattr(dist, name)
        noting = make(name, self._originals[name])
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, noting)

    def _noting_one(self, name: str, original: Any) -> Any:
        side = "send" if "send" in name else "recv"
        word = "dst" if side == "send" else "src"

        @functools.wraps(original)
        def noting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self._batch, "open", False):
                named = dict(zip((word, "group"), args, strict=False)) | kwargs
                peer = named.get(word)
                self._note([_message(side, named.get("group"), peer, named.get(f"group_{word}"))])
            return original(tensor, *args, **kwargs)

        return noting

    def _noting_batch(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def noting(ops: list[dist.P2POp]) -> Any:
            sides = ["send" if "send" in op.op.__name__ else "recv" for op in ops]
            pairs = zip(sides, ops, strict=True)
            self._note([_message(side, op.group, op.peer, op.group_peer) for side, op in pairs])
            self._batch.open = True  # over Gloo they are begun one by one
            try:
                return original(ops)
            finally:
                self._batch.open = False

        return noting

    def _note(self, messages: list[Message]) -> None:
        stack = traceback.extract_stack()[:-2]
        where = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(stack)]
        issued = Issued(_thread(where), _told(where), messages=tuple(messages))
        self._noted.append((time.time_ns(), issued))


def _message(side: str, group: Any, peer: int | None, group_peer: int | None) -> Message:
    group = group or dist.group.WORLD
    if group_peer is not None:
        peer = dist.get_global_rank(group, group_peer)
    assert peer is not None, "a message from anybody cannot be checked"
    return Message(side, str(group.group_name), peer)


def _told(where: Sequence[str]) -> str:
    """The line that says best where it was: the innermost outside of torch."""
    outside = [line for line in where if "/torch/" not in line and _OWN not in line]
    return os.path.basename((outside or list(where) or ["somewhere"])[0])


def _thread(where: Sequence[str]) -> str:
    """What the thread with this stack runs, where it is one that Python has started."""
    began = next((n for n, line in enumerate(where) if _THREAD_RUNS.search(line)), None)
    return "" if began is None else os.path.basename(where[max(began - 1, 0)]).partition(":")[0]


def find_deadlock(recordings: Sequence[Sequence[Issued]]) -> str | None:
    """Where ranks with these recordings would wait for each other over NCCL; ``None``: nowhere.

    Also finds ranks that come to one collective with different operations, dtypes or sizes.
    """
    lanes = [lane for rank, issued in enumerate(recordings) for lane in _lanes(rank, issued)]
    while True:
        if (problem := _mismatch(lanes)) is not None:
            return problem
        if not any([_finish_collectives(lanes), _finish_messages(lanes)]):
            break
    stuck = [lane for lane in lanes if lane.head is not None]
    if not stuck:
        return None
    lines = [f"  rank {lane.rank}, after {lane.at} others: {lane.head}" for lane in stuck]
    return "\n".join(["these ranks wait for each other:", *lines])


class _Lane:
    """What one thread of a rank issued, and how far it has come."""

    def __init__(self, rank: int, issued: list[Issued]) -> None:
        self.rank, self.at = rank, 0
        self._issued = issued
        self.messages: list[Message] = []
        self._open()

    @property
    def head(self) -> Issued | None:
        """What it waits in."""
        return self._issued[self.at] if self.at < len(self._issued) else None

    @property
    def call(self) -> Call | None:
        """The collective that it waits in."""
        return None if self.head is None else self.head.call

    def advance(self) -> None:
        """That is over."""
        self.at += 1
        self._open()

    def _open(self) -> None:
        self.messages = [] if self.head is None else list(self.head.messages)


def _lanes(rank: int, issued: Sequence[Issued]) -> Iterator[_Lane]:
    """A lane for each thread."""
    threads: dict[str, list[Issued]] = {}
    for each in issued:
        threads.setdefault(each.thread, []).append(each)
    for own in threads.values():
        yield _Lane(rank, own)


def _together(lanes: Sequence[_Lane]) -> Iterator[list[_Lane]]:
    """Lanes that have come to the same collective, where all of its ranks have."""
    waiting: dict[Any, list[_Lane]] = {}
    for lane in lanes:
        if lane.call is not None:
            waiting.setdefault(lane.call.key, []).append(lane)
    for key, own in waiting.items():
        if {lane.rank for lane in own} == set(key[2]):
            yield own


def _mismatch(lanes: Sequence[_Lane]) -> str | None:
    for own in _together(lanes):
        calls = [lane.call for lane in own if lane.call is not None]
        kinds = {(call.op, call.dtypes) for call in calls}
        sizes = {call.shapes for call in calls if call.op in _SAME_SIZE}
        if len(kinds) > 1 or len(sizes) > 1:
            lines = [f"  rank {lane.rank}: {lane.head}" for lane in own]
            return "\n".join(["these ranks do different things in one collective:", *lines])
    return None


def _finish_collectives(lanes: Sequence[_Lane]) -> bool:
    done = list(_together(lanes))
    for own in done:
        for lane in own:
            lane.advance()
    return bool(done)


def _finish_messages(lanes: Sequence[_Lane]) -> bool:
    moved = False
    for sender in lanes:
        for message in [m for m in sender.messages if m.op == "send"]:
            wanted = Message("recv", message.group, sender.rank)
            taker = next(
                (t for t in lanes if t.rank == message.peer and wanted in t.messages), None
            )
            if taker is not None:
                sender.messages.remove(message)
                taker.messages.remove(wanted)
                moved = True
    for lane in lanes:
        if lane.head is not None and lane.head.messages and not lane.messages:
            lane.advance()
            moved = True
    return moved
