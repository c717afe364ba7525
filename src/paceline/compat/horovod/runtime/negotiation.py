"""The coordinator's decisions: which names are ready, in which order, and what cannot be done.

Ranks submit tensors by name, in any order. A name is ready when every member of its process set has
submitted it, or has joined. Pure data: no tensors, no threads, no network, so that any order
of arrival can be tried in a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.compat.horovod.runtime.messages import GLOBAL_SET, Request, Response
from paceline.compat.horovod.runtime.mismatches import problem_of

_FUSED = ("allreduce",)


class Addressed(NamedTuple):
    """A response, and the ranks that it is for."""

    response: Response
    ranks: tuple[int, ...]


class Stalled(NamedTuple):
    """A name that some ranks have waited for too long."""

    name: str
    seconds: float
    missing: tuple[int, ...]


@dataclass
class _Pending:
    since: float
    requests: dict[int, Request] = field(default_factory=dict)


class Negotiator:
    """The state of all ranks' requests. ``clock`` gives seconds."""

    def __init__(self, size: int, fusion_bytes: int, clock: Callable[[], float]) -> None:
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._last_set = GLOBAL_SET
        self._fusion_bytes = fusion_bytes
        self._clock = clock
        self._table: dict[tuple[int, str], _Pending] = {}
        self._ready: list[tuple[int, str]] = []
        self._joined: list[int] = []
        self._threaded: set[int] = set()
        self._given_up: list[Addressed] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether some name waits for further ranks."""
        return bool(self._table)

    @property
    def has_ready(self) -> bool:
        """Whether ``take`` has something to give."""
        return bool(self._ready) or self._all_joined

    @property
    def _all_joined(self) -> bool:
        return len(self._joined) == len(self._sets[GLOBAL_SET])

    def receive(self, request: Request) -> list[Addressed]:
        """Count ``request`` in; returns what has to be answered at once."""
        if request.threaded:
            self._threaded.add(request.rank)
        if request.kind == "join":
            self._joined.append(request.rank)
            for key in list(self._table):
                self._check(key)
            return []
        if request.process_set not in self._sets:
            error = (
                f"{request.name}: process set {request.process_set} does not exist any more: it "
                "was removed."
            )
            return [Addressed(_error(request.process_set, [request.name], error), (request.rank,))]
        key = (request.process_set, request.name)
        pending = self._table.setdefault(key, _Pending(self._clock()))
        pending.requests[request.rank] = request
        self._check(key)
        return []

    def take(self) -> list[Addressed]:
        """What can be done now, in this order: small reductions put together."""
        taken: list[Addressed] = []
        open_fusions: dict[tuple[object, ...], Response] = {}
        for key in self._ready:
            requests = self._table.pop(key).requests
            addressed = self._respond(key, requests)
            response = addressed.response
            if response.kind not in _FUSED:
                open_fusions.clear()  # what comes after is not to overtake it
                taken.append(addressed)
                continue
            fusion = _fusion_key(response)
            other = open_fusions.get(fusion)
            if other is not None and _bytes(other) + _bytes(response) <= self._fusion_bytes:
                other.names += response.names
                other.dtypes += response.dtypes
                other.shapes += response.shapes
            else:
                open_fusions[fusion] = response
                taken.append(addressed)
        self._ready.clear()
        taken += self._given_up
        self._given_up.clear()
        if self._all_joined:
            last = self._joined[-1]
            self._joined.clear()
            response = Response("join", ["join"], value=last, restarts_numbers=True)
            taken.append(Addressed(response, self._sets[GLOBAL_SET]))
        return taken

    def take_deadlock(self) -> list[Addressed]:
        """Errors for all names, where every rank waits for ranks that wait elsewhere.

        A rank whose main thread waits in a collective submits nothing else; if that holds for all,
        and nothing is ready, nothing ever will be. Ranks that use several threads are not judged.
        """
        if self.has_ready or not self._table or self._threaded:
            return []
        waits: dict[int, str] = dict.fromkeys(self._joined, "join")
        for pending in self._table.values():
            for rank, request in pending.requests.items():
                if request.blocks:
                    waits[rank] = request.name
        if len(waits) < len(self._sets[GLOBAL_SET]):
            return []
        where = ", ".join(f"rank {rank} in {waits[rank]}" for rank in sorted(waits))
        answers = []
        for (process_set, name), pending in self._table.items():
            error = (
                f"{name}: no rank can go on, since each waits for ranks that wait elsewhere: "
                f"{where}. Every rank must call the same collectives."
            )
            response = _error(process_set, [name], error)
            response.restarts_numbers = True
            answers.append(Addressed(response, tuple(pending.requests)))
        self._table.clear()
        return answers

    def stalled(self, after: float) -> list[Stalled]:
        """The names that have waited for longer than ``after`` seconds."""
        now = self._clock()
        return [
            Stalled(name, now - pending.since, self._missing((process_set, name)))
            for (process_set, name), pending in self._table.items()
            if now - pending.since > after
        ]

    def outstanding(self, rank: int) -> list[str]:
        """The names that ``rank`` has submitted and that wait for others."""
        return [name for (_, name), pending in self._table.items() if rank in pending.requests]

    def _missing(self, key: tuple[int, str]) -> tuple[int, ...]:
        members = self._sets[key[0]]
        absent = set(self._joined) if key[0] == GLOBAL_SET else set()
        have = self._table[key].requests
        return tuple(rank for rank in members if rank not in have and rank not in absent)

    def _check(self, key: tuple[int, str]) -> None:
        if key not in self._ready and not self._missing(key):
            self._ready.append(key)

    def _respond(self, key: tuple[int, str], requests: dict[int, Request]) -> Addressed:
        process_set, name = key
        members = self._sets[process_set]
        submitted = tuple(rank for rank in members if rank in requests)
        joined = process_set == GLOBAL_SET and bool(self._joined)
        problem = problem_of(requests, joined)
        if problem:
            return Addressed(_error(process_set, [name], problem), submitted)
        first = requests[submitted[0]]
        response = Response(
            first.kind,
            [name],
            process_set,
            dtypes=[first.dtypes],
            shapes=[first.shapes],
            device=first.device,
            op=first.op,
            root=first.root,
            prescale=first.prescale,
            postscale=first.postscale,
        )
        ordered = [requests[rank] for rank in submitted]
        if first.kind == "allgather":
            response.first_dims = [
                [request.shapes[tensor][0] for request in ordered]
                for tensor in range(len(first.shapes))
            ]
        elif first.kind == "alltoall":
            response.splits = [request.splits for request in ordered]
        elif first.kind == "add_process_set":
            response.ranks, response.value = first.ranks, self._add_set(first.ranks)
        elif first.kind == "remove_process_set":
            return self._remove_set(first, response)
        return Addressed(response, members)

    def _add_set(self, ranks: Sequence[int]) -> int:
        """The id of the new process set; -1 where there is one of these ranks already."""
        if tuple(ranks) in self._sets.values():
            return -1
        self._last_set += 1
        self._sets[self._last_set] = tuple(ranks)
        return self._last_set

    def _remove_set(self, first: Request, response: Response) -> Addressed:
        removed = first.root
        response.value = removed if removed in self._sets and removed != GLOBAL_SET else -1
        if response.value > 0:
            del self._sets[removed]
            for key in [key for key in self._table if key[0] == removed]:
                error = f"{key[1]}: its process set {removed} was removed while ranks waited."
                waiting = tuple(self._table.pop(key).requests)
                self._given_up.append(Addressed(_error(removed, [key[1]], error), waiting))
        return Addressed(response, self._sets[GLOBAL_SET])


def _error(process_set: int, names: list[str], text: str) -> Response:
    return Response("error", names, process_set, error=text)


def _fusion_key(response: Response) -> tuple[object, ...]:
    return (
        response.process_set,
        response.device,
        response.op,
        response.prescale,
        response.postscale,
        tuple(sorted({dtype for dtypes in response.dtypes for dtype in dtypes})),
    )


def _bytes(response: Response) -> int:
    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize
        for shapes, dtypes in zip(response.shapes, response.dtypes, strict=True)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
