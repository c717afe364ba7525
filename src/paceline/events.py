"""What a run says of itself: typed records, written as JSON lines, read by everything that reports.

The trainer and the launcher write; the progress bar, TensorBoard, MLflow, ``History`` and whatever
comes later read. Nobody else asks the run anything.

A record that this version does not know (written by a newer one) is skipped by :func:`read`;
fields it does not know are dropped, so that an old reader can follow a newer run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from paceline.record_fields import FINITE, MOMENT, NOT_EMPTY, POSITIVE, read_fields
from paceline.untrusted import MIB, open_file, open_to_append, parse_json, read_lines

FILE_NAME = "events.jsonl"
MOST_BYTES = 2048 * MIB
"""The largest event log that is read: that of some ten million steps."""
LONGEST_LINE = 16 * MIB
"""The longest event: the stacks of a few thousand ranks."""

Seconds = Annotated[float, FINITE]
Steps = Annotated[int, POSITIVE]
Moment = Annotated[float, MOMENT]
ByRank = Annotated[list[int], NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened; ``time`` is seconds since the epoch."""

    time: Moment = field(default_factory=time.time)

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls

    def to_json(self) -> str:
        """The record as one line of JSON, its class name under ``kind``.

        JSON has no NaN or infinity: they become the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
        """
        return json.dumps({"kind": type(self).__name__, **_plain(dataclasses.asdict(self))})

    @staticmethod
    def from_json(line: str | bytes) -> Event | None:
        """The record in ``line``; ``None`` where there is none that this version can read.

        The line may be cut short or be anything else, its kind may be unknown, a field may be
        missing or not of its type.
        """
        try:
            data = parse_json(line)
            cls = Event.kinds.get(kind) if (kind := kind_of(data)) else None
            return None if cls is None else cls(**read_fields(cls, data))
        except ValueError:
            return None


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
class RunStarted(Event):
    """Training begins, or goes on from ``first_step`` when a checkpoint was resumed."""

    layout: str
    world_size: int
    device: str
    precision: str
    global_batch: int | None
    parameters: int
    samples_per_epoch: int | None
    total_steps: int | None
    first_step: int = 0


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step; ``loss`` is the mean over the global batch, ``step`` counts from 1."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples: int
    seconds: Seconds
    grad_norm: float | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalDone(Event):
    """One pass over the validation data; ``metrics`` holds ``loss`` and the user's own."""

    step: int
    epoch: int
    metrics: dict[str, float]
    samples: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class EpochDone(Event):
    """The end of an epoch; ``loss`` is the sample-weighted mean over its steps."""

    step: int
    epoch: int
    loss: float
    samples: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class MemoryMeasured(Event):
    """Bytes held by each rank, by rank; ``activations`` and ``peak`` are of the measured step."""

    step: int
    parameters: ByRank
    gradients: ByRank
    optimizer: ByRank
    buffers: ByRank
    activations: ByRank
    peak: ByRank
    current: ByRank


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk, verified, and safe to resume from.

    ``reason`` is ``every``, ``minutes``, ``epoch``, ``best``, ``asked``, ``retry`` (an earlier one
    failed), ``stop`` or ``end``;
    ``seconds`` is how long writing took, ``stalled`` how long the run stood still for it.
    """

    step: int
    path: str
    bytes: int
    seconds: Seconds
    reason: str
    stalled: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; earlier ones are as they were."""

    step: int
    reason: str
    error: str


@dataclass(frozen=True, kw_only=True)
class RestoreTried(Event):
    """A place to resume from was tried: memory, a partner's memory, or a checkpoint on disk."""

    rung: str
    step: int | None
    ok: bool
    detail: str
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event):
    """NaN or Inf in the ``what`` (loss or gradients) of some ranks; ``action`` is stop or skip."""

    step: int
    what: str
    ranks: list[int]
    action: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Baseline(Event):
    """The validation loss of something simpler on the same data, to hold the run's against."""

    name: str
    loss: float


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Something a person should read: ``level`` is ``info`` or ``warning``."""

    message: str
    level: str = "info"


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run ended by itself; ``reason`` is ``done``, ``stopped`` or ``interrupted``."""

    reason: str
    step: int
    epoch: int
    samples: int
    seconds: Seconds
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """The run died; ``rank`` is the first rank to fail, ``error`` its last line or its signal."""

    rank: int
    error: str
    exit_code: int


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


@dataclass(frozen=True, kw_only=True)
class StepSplit(Event):
    """Where the time of the ``steps`` steps up to ``step`` went, in mean seconds by rank.

    ``phases`` maps data, forward, backward, waiting, optimizer and other to one number a rank.
    """

    step: int
    steps: Steps
    phases: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class WireUsed(Event):
    """The bytes of gradients that each rank sent in the ``steps`` steps up to ``step``.

    Told where they travel in another form, or not after every step. ``bytes_plain`` is what each
    rank would have sent of them as they are, after every step. ``what`` they sent: ``gradients``,
    ``warmup`` (gradients as they are, before compression begins) or ``distances`` (replicas that
    train alone tell each other how far they came).
    """

    step: int
    steps: Steps
    bytes_sent: ByRank
    bytes_plain: ByRank
    what: str = "gradients"


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """A rank for which the others wait: ``costs`` seconds of every step, ``share`` of its time.

    ``phase`` is where it is slow, ``factor`` how much slower than the median of the other ranks.
    """

    step: int
    rank: int
    host: str
    phase: str
    factor: Seconds
    costs: Seconds
    share: Seconds


@dataclass(frozen=True, kw_only=True)
class EventsLost(Event):
    """``count`` events before this one could not be written, since ``since``, because of ``error``.

    ``what`` counts them by kind.
    """

    count: int
    since: Moment
    error: str
    what: dict[str, int] = field(default_factory=dict)


class EventLog:
    """Appends events to ``<folder>/events.jsonl``, one unbuffered write a line.

    Several processes may append to one file: each line is a single ``O_APPEND`` write.

    A run goes on when its events cannot be written (a full disk, a quota, one that fails or became
    read-only): they are dropped and counted, ``say`` is told once, and as soon as there is room
    again the log says how many are missing. A file that was deleted is made anew. That the log
    cannot even be opened is an ``OSError``.
    """

    def __init__(
        self, folder: str | os.PathLike[str], say: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(folder) / FILE_NAME
        self._say = say
        self._lost: Counter[str] = Counter()
        self._lost_since = 0.0
        self._error = ""
        self._file = self._open()

    def write(self, event: Event) -> bool:
        """Append one event; whether it was written."""
        lines = [event]
        if self._lost:
            lines.insert(0, self._of_the_lost())
        data = b"".join(line.to_json().encode() + b"\n" for line in lines)
        try:
            self._append(data)
        except OSError as error:
            self._lose(event, error)
            return False
        self._lost.clear()
        return True

    def close(self) -> None:
        """Close the file; further writes fail."""
        if self._lost:
            with contextlib.suppress(OSError):
                self._append(self._of_the_lost().to_json().encode() + b"\n")
        self._file.close()

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Readable, too: see _append.
        return io.FileIO(open_to_append(self.path), "ab+")

    def _append(self, data: bytes) -> None:
        found = os.fstat(self._file.fileno())
        if found.st_nlink == 0:
            file, self._file = self._file, self._open()
            file.close()
            if self._say is not None:
                self._say(f"{self.path} was deleted while the run goes on; it is begun anew.")
            found = os.fstat(self._file.fileno())
        # A writer that was killed, or met a full disk, may have left half a line.
        broken = found.st_size and os.pread(self._file.fileno(), 1, found.st_size - 1) != b"\n"
        data = b"\n" + data if broken else data
        written = self._file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _lose(self, event: Event, error: OSError) -> None:
        if not self._lost:
            self._lost_since, self._error = event.time, error.strerror or str(error)
            if self._say is not None:
                self._say(
                    f"the run's events cannot be written to {self.path} ({self._error}). The run "
                    "goes on, and they are dropped until that is put right."
                )
        self._lost[type(event).__name__] += 1

    def _of_the_lost(self) -> EventsLost:
        return EventsLost(
            count=self._lost.total(),
            since=self._lost_since,
            error=self._error,
            what=dict(self._lost),
        )


def append(folder: str | os.PathLike[str], event: Event) -> bool:
    """Add one event to the log in ``folder``; whether that could be done."""
    try:
        log = EventLog(folder)
    except OSError:
        return False
    try:
        return log.write(event)
    finally:
        log.close()


def read(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of a run, oldest first; ``path`` is the file or the run folder that holds it.

    Lines that hold none are passed over.
    """
    for line in read_log_lines(path):
        if line is not None and (event := Event.from_json(line)) is not None:
            yield event


def read_log_lines(path: str | os.PathLike[str]) -> Iterator[bytes | None]:
    """The lines of an event log; ``None`` for one longer than any event (:data:`LONGEST_LINE`).

    Raises ``OSError`` where it is not a regular file, or larger than :data:`MOST_BYTES`.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    with open_file(path, MOST_BYTES) as file:
        yield from read_lines(file, LONGEST_LINE)


def kind_of(data: Any) -> str:
    """The kind that a record claims to be of; empty where it claims nothing."""
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else ""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
