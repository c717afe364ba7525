"""Trackers that keep a run's numbers: what they have in common, and what each writes itself."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.events import Event, MediaLogged, RunFailed, RunFinished, RunStarted
from paceline.track.scalars import Numbers, scalars
from paceline.track.tracker import Recorder
from paceline.untrusted import parse_json, read_bytes, write_private

Ending = Literal["finished", "failed", "interrupted"]
_MOST_STATE_BYTES = 64 * 1024


class RunRecorder(Recorder):
    """A recorder of numbers: override ``begin``, ``log`` and ``end``.

        class Print(RunRecorder):
            name = "Print"

            def begin(self, facts, first_step):
                print("from step", first_step, "on", facts["layout"])

            def log(self, step, values, time):
                print(step, values)

            def end(self, how):
                print(how)

    All three are called in a thread of their own, so that a slow disk or server does not slow the
    training; an error in them ends the recording with one warning, and never the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._how: Ending = "interrupted"

    @abstractmethod
    def begin(self, facts: Mapping[str, Any], first_step: int) -> None:
        """The run starts, or goes on after ``first_step``, from a checkpoint or a restart.

        ``facts`` are its layout, world_size, device, precision, global_batch and parameters.
        """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Numbers of a step by name, such as ``train/loss``; ``time`` in seconds since 1970."""

    def show(self, event: MediaLogged) -> None:
        """An image, a histogram or a text: override it where they can be shown.

        ``paceline.track.media`` reads the file that ``event`` names.
        """

    @abstractmethod
    def end(self, how: Ending) -> None:
        """The run is over; called once, and only where it has begun."""

    def record(self, events: Sequence[Event]) -> None:
        """Hand ``events`` to the three methods."""
        for event in events:
            if isinstance(event, RunStarted):
                self._how = "interrupted"  # unless we hear of another end
                self._begun = True
                self.begin(facts_of(event), event.first_step)
            elif isinstance(event, Numbers | MediaLogged):
                if not self._begun:  # the launcher was started anew beside a run that goes on
                    self._begun = True
                    self.begin({}, event.step - 1)
                if isinstance(event, MediaLogged):
                    self.show(event)
                else:
                    self.log(event.step, dict(scalars(event)), event.time)
            elif isinstance(event, RunFinished):
                self._how = "interrupted" if event.reason == "interrupted" else "finished"
            elif isinstance(event, RunFailed):
                self._how = "failed"

    def finish(self) -> None:
        """Close what ``begin`` opened."""
        if self._begun:
            self._begun = False
            self.end(self._how)


class RemoteRun:
    """The id under which a service keeps a run, in a file of the run's folder.

    A resumed run goes on under the same one. The file never holds a key.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None, file_name: str) -> None:
        self._file = None if run_dir is None else Path(run_dir) / file_name

    def load(self) -> str | None:
        """The id of an earlier start; ``None`` where there was none."""
        if self._file is None or not self._file.exists():
            return None
        state = parse_json(read_bytes(self._file, _MOST_STATE_BYTES))
        if not isinstance(state, dict) or not isinstance(state.get("id"), str):
            raise ValueError(f"{self._file} does not name a run. Delete it for a new one.")
        return str(state["id"])

    def save(self, run_id: str) -> None:
        """Keep the id for a resume."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_name(f".{self._file.name}.part")
            write_private(part, json.dumps({"id": run_id}).encode())
            part.replace(self._file)


def facts_of(event: RunStarted) -> dict[str, Any]:
    """What a run is, as parameters of it."""
    names = ("layout", "world_size", "device", "precision", "global_batch", "parameters")
    return {name: getattr(event, name) for name in names}


def shown_params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Parameters as all who open a tracker may see them: credentials are masked."""
    return {key: as_shown(key, value) for key, value in (params or {}).items()}


def as_shown(key: str, value: Any) -> Any:
    """One parameter, which may hold a credential, as everybody may see it."""
    from paceline.masking import shown

    *above, name = key.split(".")
    return shown(value, name, bare_key="storage" in above)
