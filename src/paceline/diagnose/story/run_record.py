"""A run folder as the post-mortem finds it: its events, and whether somebody still writes them."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError
from paceline.events import (
    FILE_NAME,
    Event,
    GaveUp,
    RunFailed,
    RunFinished,
    StepDone,
    kind_of,
    read_log_lines,
)
from paceline.launch.run_folder import RunFolder, list_runs
from paceline.untrusted import open_file, parse_json

_FRESH_SECONDS = 10.0
_NAMED, _LONGEST_KIND = 10, 40


@dataclass
class RunRecord:
    """The events of a run, and what is odd about the file they are in."""

    events: list[Event] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)


def find_run(path: str | None) -> RunFolder:
    """The run folder ``path``, or the latest run in ``runs/``; it must hold events."""
    if path is None:
        path = str(_latest())
    run = RunFolder(Path(path))
    if run.path.name == FILE_NAME and run.path.is_file():
        run = RunFolder(run.path.parent)
    if run.events.is_file():
        return run
    raise ConfigError(_why_no_run(run))


def _latest() -> RunFolder:
    here = RunFolder(Path("."))
    if here.events.is_file() and here.config.is_file():
        return here  # called from inside a run folder
    found = list_runs("runs")
    if not found:
        raise ConfigError(
            "there is no run in runs/ below the current folder. Name the folder of a run: "
            "paceline diagnose RUN"
        )
    return found[0]


def _why_no_run(run: RunFolder) -> str:
    path = str(run.path)
    if not run.path.exists():
        problem = f"{path!r} does not exist."
    elif not run.path.is_dir():
        problem = f"{path!r} is a file, not a run folder."
    elif run.config.is_file() or run.logs.is_dir():
        logs = f" Its logs are in {run.logs}." if run.logs.is_dir() else ""
        return (
            f"{path!r} holds no {FILE_NAME}: nothing was recorded of this run, because it is a "
            f"script's own, or it ended before its ranks were started.{logs}"
        )
    else:
        problem = f"{path!r} is not a run folder: it has no {FILE_NAME}."
    folders = (run.path, run.path.parent, run.path.parent / "runs")
    nearby = next((found[0] for folder in folders if (found := list_runs(folder))), None)
    return problem + (f" The latest run nearby is {nearby}." if nearby else " Name a run folder.")


def read_record(run: RunFolder) -> RunRecord:
    """The events of a run; lines that are none are counted, not fatal, unless all are."""
    record = RunRecord()
    broken, strange = 0, Counter[str]()
    try:
        for line in read_log_lines(run.events):
            event = None if line is None else Event.from_json(line)
            if event is not None:
                record.events.append(event)
            elif line is None or not (kind := _unknown_kind(line)):
                broken += line is None or bool(line.strip())
            else:
                strange[kind] += 1
    except OSError as error:
        raise ConfigError(f"{run.events} cannot be read: {error.strerror or error}.") from None
    if not record.events:
        raise ConfigError(_why_no_events(run, broken, strange))
    if broken:
        lines = "1 line is" if broken == 1 else f"{broken} lines are"
        record.oddities.append(
            f"{lines} broken in {run.events} (a writer was cut off, or it was not a run that "
            "wrote them)."
        )
    if strange:
        record.oddities.append(
            f"this version of paceline does not know all records of this run "
            f"({_names(strange)}): another version wrote it."
        )
    return record


def _names(strange: Counter[str]) -> str:
    """The kinds that came most often, with how often where it is more than once."""
    told = [f"{kind} × {n}" if n > 1 else kind for kind, n in strange.most_common(_NAMED)]
    return ", ".join([*sorted(told), "…"] if len(strange) > _NAMED else sorted(told))


def _why_no_events(run: RunFolder, broken: int, strange: Counter[str]) -> str:
    if strange:
        return (
            f"{run.events} holds records of another version of paceline only "
            f"({_names(strange)}). Use the version that the run was started with."
        )
    if broken:
        return f"{run.events} holds no event: none of its {broken} lines can be read."
    return (
        f"{run.events} is empty: the run ended, or was ended, before it did anything. "
        f"See {run.logs} for what its ranks wrote."
    )


def _unknown_kind(line: bytes) -> str:
    """The kind of a record that is whole and of a kind of its own; empty where it is broken.

    A kind that this version knows, without a field that it asks for, may be of another version.
    """
    try:
        return kind_of(parse_json(line))[:_LONGEST_KIND]
    except ValueError:
        return ""


def is_running(run: RunFolder, events: list[Event], now: float | None = None) -> bool:
    """Whether a launcher holds the folder; where no launcher does, whether events still come."""
    held = _is_held(run.path / ".lock")
    if held is None:  # a trainer that was started by hand locks its checkpoints alone
        held = _is_held(run.checkpoints / ".lock") or _grows(run, events, now)
    return held


def _is_held(path: Path) -> bool | None:
    """Whether a process holds this lock; ``None`` where there is none, or no way to know."""
    try:
        with open_file(path) as file:
            # For an instant. The launchers of several machines share it: only one who wants it
            # for himself notices them.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _grows(run: RunFolder, events: list[Event], now: float | None) -> bool:
    """Whether the last event is but a moment old: a few of the run's longest recent steps."""
    if not events or isinstance(events[-1], RunFinished | RunFailed | GaveUp):
        return False
    steps = [e.seconds for e in events[-50:] if isinstance(e, StepDone)]
    moment = max(_FRESH_SECONDS, 5 * max(steps, default=0.0))
    now = time.time() if now is None else now
    return now - os.stat(run.events).st_mtime < moment
