"""What is known of the runs below a folder, from the beginning and the end of their event logs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import yaml_file
from paceline.diagnose.story.run_record import is_running
from paceline.errors import ConfigError
from paceline.events import (
    EvalDone,
    Event,
    GaveUp,
    Restarting,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
)
from paceline.formatting import number
from paceline.launch.run_folder import RunFolder
from paceline.untrusted import MOST_CONFIG_BYTES, open_file, read_bytes

_HEAD, _TAIL = 64 * 1024, 512 * 1024
_DEEPEST = 4
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True)
class ListedRun:
    """One run, as ``paceline runs`` shows it."""

    path: str
    name: str
    tags: tuple[str, ...]
    state: str
    layout: str | None
    step: int | None
    total_steps: int | None
    loss: float | None
    val_loss: float | None
    last_seconds: float
    """When something of it last happened, in seconds since 1970."""

    def row(self) -> list[str]:
        """The cells of its line in the table."""
        step = "-" if self.step is None else str(self.step)
        if self.total_steps is not None:
            step += f"/{self.total_steps}"
        loss = "-" if self.loss is None else number(self.loss)
        age = age_text(time.time() - self.last_seconds)
        return [self.path, self.state, self.layout or "-", step, loss, age, ", ".join(self.tags)]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        told = asdict(self)
        last = told.pop("last_seconds")
        return {**told, "age_seconds": round(time.time() - last, 1)}


def find_runs(roots: Sequence[str]) -> list[ListedRun]:
    """The runs in ``roots``, or below, latest first."""
    for root in roots:
        if not os.path.isdir(root) and root != "runs":
            raise ConfigError(f"{root!r} is not a folder. Name the folder that holds the runs.")
    folders = {os.path.realpath(f): f for root in roots for f in _run_folders(Path(root), 0)}
    listed = [look_at(folder) for folder in folders.values()]
    return sorted(listed, key=lambda run: (run.last_seconds, run.path), reverse=True)


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Folders that hold a run; a run holds no other."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except OSError:
        return
    if "events.jsonl" in entries or {"config.yaml", ".lock"} <= entries.keys():
        yield folder
    elif depth < _DEEPEST:
        for name, entry in entries.items():
            if not name.startswith(".") and _is_folder(entry):
                yield from _run_folders(folder / name, depth + 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, say
        return False


def look_at(folder: Path) -> ListedRun:
    """What is known of the run in ``folder``; nothing of it is changed."""
    run = RunFolder(folder)
    events = _ends_of_log(run.events)
    settings = _settings(run.config)
    started = _last(events, RunStarted)
    step, evaluation = _last(events, StepDone), _last(events, EvalDone)
    tags = settings.get("tags")
    written = run.events if events else run.config if run.config.exists() else run.path
    name, layout = settings.get("name"), settings.get("layout")
    return ListedRun(
        path=str(folder),
        name=name if isinstance(name, str) else folder.name,
        tags=tuple(str(one) for one in tags) if isinstance(tags, list) else (),
        state=_state(run, events),
        layout=started.layout if started else layout if isinstance(layout, str) else None,
        step=step.step if step else started.first_step if started else None,
        total_steps=started.total_steps if started else None,
        loss=step.loss if step else None,
        val_loss=evaluation.metrics.get("loss") if evaluation else None,
        last_seconds=max(events[-1].time, 0.0) if events else written.stat().st_mtime,
    )


def _state(run: RunFolder, events: list[Event]) -> str:
    if is_running(run, events):
        return "running"
    for event in reversed(events):
        if isinstance(event, RunFinished):
            return "interrupted" if event.reason == "interrupted" else "finished"
        if isinstance(event, RunFailed | GaveUp):
            return "failed"
        if isinstance(event, StepDone | Restarting):  # cut short: not by a refused start alone
            return "interrupted"
    return "interrupted"


def _ends_of_log(path: Path) -> list[Event]:
    """The events at the beginning and at the end of a log, which may be large."""
    try:
        with open_file(path) as file:
            length = os.fstat(file.fileno()).st_size
            *lines, cut = file.read(_HEAD).split(b"\n")
            begin = file.tell() - len(cut)
            if length - _TAIL > begin:
                file.seek(length - _TAIL)
                cut = file.read(_TAIL).partition(b"\n")[2]
            else:
                cut += file.read(_TAIL)
            lines += cut.split(b"\n")
    except OSError:
        return []
    events = (Event.from_json(line) for line in lines if line)
    return [event for event in events if event is not None]


def _settings(config: Path) -> dict[str, Any]:
    """What a run's config says, unchecked: it may be of another version."""
    try:
        text = read_bytes(config, MOST_CONFIG_BYTES).decode()
        found, _ = yaml_file.read(text, str(config))
    except (OSError, ValueError, ConfigError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(events: Iterable[Event], kind: Any) -> Any:
    return next((event for event in reversed(list(events)) if isinstance(event, kind)), None)


def age_text(seconds: float) -> str:
    """``42 s``, ``5 min``, ``3 h``, ``2 d``: how long ago something was."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"
