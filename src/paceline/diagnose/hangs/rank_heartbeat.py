"""Heartbeats, and the reports of ranks on a run that stands still: plain data, sent as JSON.

A rank sends a ``Heartbeat`` every second or so, and a ``RankReport`` when one is asked
for. For a process that cannot answer (stopped, or with its interpreter held by native code), a
neighbour looks at it from outside and reports; ``RankReport.state`` says which it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.launch.messages import decode, encode

ANSWERS = "answers"
"""The rank itself made the report."""
SILENT = "silent"
"""Its process lives but does not answer: native code holds the interpreter."""
STOPPED = "stopped"
"""Its process was stopped (SIGSTOP, a debugger)."""
LEFT = "left"
"""It left the world by itself, with success as far as it knew."""
GONE = "gone"
"""Its process is not there any more."""
UNREACHABLE = "unreachable"
"""Nobody on its machine can say anything of it."""


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True)
class Call:
    """One collective as a rank recorded it: the ``number``-th of its group."""

    backend: str
    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    done: bool = True

    @property
    def key(self) -> GroupKey:
        """Which group's calls it is counted among."""
        return self.backend, self.group, self.ranks


GroupKey = tuple[str, str, tuple[int, ...]]
"""Backend, name and ranks: names alone are not unique over all ranks, nor are ranks."""


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank is in a group: so many collectives ``begun``, so many of them ``done``."""

    backend: str
    group: str
    ranks: tuple[int, ...]
    begun: int
    done: int

    @property
    def key(self) -> GroupKey:
        """Which group it is."""
        return self.backend, self.group, self.ranks


@dataclass(frozen=True)
class PointToPoint:
    """A point-to-point call that the training thread is in; ``peer`` is a rank of the world."""

    op: str
    peer: int | None


@dataclass(frozen=True)
class RankReport:
    """Where a rank is. ``seconds`` is how long it has not moved; ``stack`` begins outermost.

    ``paced`` says that it is at work on a step, as an engine or trainer marked it. ``kernel`` is
    where in the kernel the training thread sleeps, as far as the system tells; ``disk`` that it
    cannot even be interrupted there.
    """

    rank: int
    state: str = ANSWERS
    host: str = ""
    pid: int = 0
    step: int | None = None
    phase: str = ""
    seconds: float = 0.0
    paced: bool = False
    groups: tuple[GroupProgress, ...] = ()
    calls: tuple[Call, ...] = ()
    message: PointToPoint | None = None
    stack: tuple[Frame, ...] = ()
    kernel: str = ""
    disk: bool = False

    def to_json(self) -> str:
        """The report as text."""
        return encode(self)

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """What ``to_json`` made."""
        return decode(cls, text)


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat. ``world`` tells one joining of ranks from the next in the same store.

    ``still`` is how long the rank has not moved; ``after`` how long it may. ``main_thread`` is
    what a neighbour needs to tell its stack from those of its other threads.
    """

    rank: int
    world: tuple[int, int]
    number: int
    host: str
    pid: int
    after: float
    still: float
    moves: int
    step: int | None = None
    phase: str = ""
    paced: bool = False
    longest_step: float = 0.0
    left: bool = False
    in_message: bool = False
    main_thread: int = 0
    groups: tuple[GroupProgress, ...] = field(default=())

    def report(self, **more: Any) -> RankReport:
        """A report that begins with what the heartbeat says."""
        return RankReport(
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            step=self.step,
            phase=self.phase,
            seconds=self.still,
            paced=self.paced,
            groups=self.groups,
            **more,
        )

    @property
    def waiting(self) -> bool:
        """Whether a collective was begun that is not over, or a message is waited for."""
        return self.in_message or any(place.begun > place.done for place in self.groups)

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes when the rank moves."""
        return self.moves, sum(place.begun + place.done for place in self.groups)

    def to_json(self) -> str:
        """The heartbeat as text."""
        return encode(self)

    @classmethod
    def from_json(cls, text: str) -> Heartbeat:
        """What ``to_json`` made."""
        return decode(cls, text)
