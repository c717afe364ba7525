"""Events of the ranks and nodes: started, lost, hanging, started again."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.events.event import Event, Seconds


@dataclass(frozen=True, kw_only=True)
class RanksStarted(Event):
    """The launcher brought up its processes; ``attempt`` counts starts from 0.

    ``nproc`` ranks on the launcher's own node; ``world_size`` over all ``nodes`` (host names in
    the order of their ranks), of which ``idle`` stand by because the layout has no place for them.
    """

    nproc: int
    attempt: int = 0
    world_size: int = 0
    nodes: list[str] = field(default_factory=list)
    idle: int = 0


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """A rank ended before its time, the first of its world to do so; the run may yet go on.

    ``cause`` is ``failed`` (it raised, exited or was killed), ``hang`` or ``node`` (its node gave
    no sign of life any more; ``rank`` is then the first one there). ``step`` is the last one done.
    ``told_at_end``: the launcher is about to end with the whole error on the console.
    """

    rank: int
    host: str
    cause: str
    error: str
    exit_code: int | None
    step: int | None
    log: str = ""
    told_at_end: bool = False


@dataclass(frozen=True, kw_only=True)
class Restarting(Event):
    """The ranks are started again, after ``delay`` seconds.

    ``reason`` is ``failure``, ``hang``, ``preemption`` (a node was told to leave), ``node_lost``
    or ``node_joined``; ``used`` of ``budget`` restarts for such a reason are used (``budget`` is
    ``None`` where it has none).
    """

    reason: str
    detail: str
    delay: Seconds = 0.0
    used: int = 0
    budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """No further restart: ``reason`` says which rule ended it, and names the failure."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """The run died; ``rank`` is the first rank to fail, ``error`` its last line or its signal."""

    rank: int
    error: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class NodeLeft(Event):
    """A node is no longer part of the world; ``reason`` is ``lost``, ``preempted`` or ``ended``."""

    host: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Event):
    """A node became part of a world that had formed without it."""

    host: str


@dataclass(frozen=True, kw_only=True)
class HangFound(Event):
    """The run has not moved for ``seconds``: who is missing, from what, and where it is instead.

    ``what`` is the kind of hang (see ``paceline.diagnose``), ``ranks`` are those to blame,
    ``summary`` is one line, ``detail`` the whole report: every rank's collective and the Python
    stack of each missing rank. ``action`` is what follows: ``wait``, ``restart`` or ``stop``.
    """

    step: int | None
    seconds: Seconds
    what: str
    ranks: list[int]
    summary: str
    detail: str
    action: str


@dataclass(frozen=True, kw_only=True)
class HangOver(Event):
    """A run that had been reported as standing still moves again, by itself."""

    step: int | None
    seconds: Seconds
