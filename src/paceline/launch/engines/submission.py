"""The record of a run that was handed to an engine, kept in the run's folder.

A run's folder may come from anybody, and what is in it contacts nobody and ends nothing. So a copy
lies in the user's own folder, and only what both say is acted upon.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.run_folder import SUBMISSION
from paceline.untrusted import parse_json, read_bytes, write_private

_FILE = "submission.json"
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Submission:
    """Which engine has a run, and by which name it knows it."""

    engine: str
    job: str
    """The engine's own name for it: a job's number, a job's name, a process."""
    run: Path
    details: dict[str, str] = field(default_factory=dict)
    """What else the engine needs to find it again, like a cluster or a namespace."""
    submitted: float = field(default_factory=time.time)

    def save(self) -> None:
        """Write the record into the run's folder and the user's own, in place of an earlier one."""
        text = json.dumps({**asdict(self), "run": str(self.run)}, indent=1).encode()
        own = _own_copy(self.run)
        own.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (own, self.run / SUBMISSION / _FILE):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            write_private(part, text)
            os.replace(part, path)

    def is_own(self) -> bool:
        """Whether this user has handed it over, as the record says."""
        own = _read(_own_copy(self.run), self.run)
        return own is not None and own == self


def read_submission(run: str | os.PathLike[str]) -> Submission | None:
    """The record in the folder of a run; ``None`` where nothing was handed over.

    Raises ``ConfigError`` for a record that is none.
    """
    return _read(Path(run) / SUBMISSION / _FILE, Path(run))


def state_folder(kind: str) -> Path:
    """Where the user's own records of this kind lie."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "paceline" / kind


def _own_copy(run: Path) -> Path:
    place = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:32]
    return state_folder("submissions") / f"{place}.json"


def _read(path: Path, run: Path) -> Submission | None:
    try:
        text = read_bytes(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from None
    try:
        record = parse_json(text)
        engine, job, details = record["engine"], record["job"], record["details"]
        texts = [engine, job, *details, *details.values()]
        if not all(isinstance(one, str) for one in texts):
            raise TypeError
        return Submission(engine, job, run, dict(details), float(record["submitted"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{str(path)!r} is no record of a run that was handed over. Where the run is, its "
            "engine knows."
        ) from None
