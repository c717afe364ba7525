"""The record of a run that was handed to an engine, kept in the run's folder."""

from __future__ import annotations

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
        """Write the record into the run's folder, in place of an earlier one."""
        record = {**asdict(self), "run": str(self.run)}
        folder = self.run / SUBMISSION
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{_FILE}.part"
        write_private(part, json.dumps(record, indent=1).encode())
        os.replace(part, folder / _FILE)


def read_submission(run: str | os.PathLike[str]) -> Submission | None:
    """The record in the folder of a run; ``None`` where nothing was handed over.

    Raises ``ConfigError`` for a record that is none.
    """
    path = Path(run) / SUBMISSION / _FILE
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
        return Submission(engine, job, Path(run), dict(details), float(record["submitted"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{str(path)!r} is no record of a run that was handed over. Where the run is, its "
            "engine knows."
        ) from None
