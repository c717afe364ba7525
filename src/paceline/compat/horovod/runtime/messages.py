"""What ranks and the coordinator (rank 0's thread) say to each other: plain data, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GLOBAL_SET = 0
"""The id of the process set of all ranks."""


@dataclass
class Request:
    """One rank is ready to take part in a collective, of one tensor or of a group of tensors."""

    rank: int
    kind: str
    """``allreduce``, ``adasum``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``,
    ``barrier``, ``join``, ``add_process_set``, ``remove_process_set``; ``shutdown`` and ``failed``
    end all."""
    name: str
    process_set: int = GLOBAL_SET
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    device: str = "cpu"
    op: int = -1
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    blocks: bool = False
    """The rank's main thread waits for this one: it submits nothing else meanwhile."""
    threaded: bool = False
    """Submitted by another thread than the main one."""
    problem: str = ""
    """Why the rank could not submit it; the others that wait for it are to know."""


@dataclass
class Response:
    """What the members of a process set do next, in the order in which these arrive."""

    kind: str
    """A kind of request, ``error`` or ``shutdown``."""
    names: list[str]
    process_set: int = GLOBAL_SET
    dtypes: list[list[str]] = field(default_factory=list)
    """Of each name the dtypes of its tensors; likewise the shapes, which only ranks that have
    joined need."""
    shapes: list[list[list[int]]] = field(default_factory=list)
    device: str = "cpu"
    op: int = -1
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    first_dims: list[list[int]] = field(default_factory=list)
    """allgather: of each tensor the first dimension on each member."""
    splits: list[list[int]] = field(default_factory=list)
    """alltoall: what each member sends to each."""
    value: int = -1
    """join: the rank that joined last; process sets: the id, or -1."""
    ranks: list[int] = field(default_factory=list)
    error: str = ""
    restarts_numbers: bool = False
    """All ranks wait here, with nothing else outstanding: tensors without a name are counted anew,
    since ranks may have submitted different numbers of them."""


def encode(messages: Sequence[Request | Response]) -> bytes:
    """Messages of one kind, for the wire."""
    return json.dumps([vars(message) for message in messages]).encode()


def decode_requests(data: bytes) -> list[Request]:
    """The reverse of ``encode`` for requests."""
    return [Request(**fields) for fields in _fields(data)]


def decode_responses(data: bytes) -> list[Response]:
    """The reverse of ``encode`` for responses."""
    return [Response(**fields) for fields in _fields(data)]


def _fields(data: bytes) -> list[dict[str, Any]]:
    return json.loads(data)
