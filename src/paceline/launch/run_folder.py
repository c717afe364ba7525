"""Run folders: what a launch leaves on disk, and where in it things lie.

::

    runs/demo-20250131-142501/
        config.yaml      the resolved config
        events.jsonl     what happened, one JSON record a line
        logs/            output by rank
        checkpoints/     saved state
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from paceline import events
from paceline.errors import ConfigError


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / events.FILE_NAME

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.path / "tensorboard"

    def __str__(self) -> str:
        return str(self.path)


def new_run(root: str | os.PathLike[str], name: str) -> RunFolder:
    """Make ``root/<name>-<date>-<time>``; an existing folder is never taken, not even in a race."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        suffix = "" if number == 1 else f"-{number}"
        path = Path(root) / f"{name}-{now}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise _cannot_make(path, "a file is in the way") from None
            number += 1
        except OSError as error:
            raise _cannot_make(path, error.strerror or str(error)) from error
        else:
            return RunFolder(path)


def new_run_at(path: str | os.PathLike[str]) -> RunFolder:
    """Make the run folder ``path``, which must not exist yet or be an empty folder."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = any(path.iterdir())
    except FileExistsError:
        raise _cannot_make(path, "a file is in the way") from None
    except OSError as error:
        raise _cannot_make(path, error.strerror or str(error)) from error
    if taken:
        raise ConfigError(
            f"run folder {str(path)!r} is not empty, and a run never writes over another. Go on "
            f"with the run in it: paceline train --resume {path}; or name a new folder."
        )
    return RunFolder(path)


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """The run folder ``path``, which must hold a run."""
    run = RunFolder(Path(path))
    if run.config.is_file():
        return run
    if not run.path.exists():
        found = f"run folder {str(path)!r} does not exist."
    elif not run.path.is_dir():
        found = f"run folder {str(path)!r} is a file."
    else:
        found = f"folder {str(path)!r} is not a run folder: it has no config.yaml."
    # The folder above may be the root of runs, or the path itself may.
    nearby = latest_run(run.path) or latest_run(run.path.parent)
    hint = f" The latest run nearby is {nearby}." if nearby else ""
    raise ConfigError(found + hint)


def list_runs(root: str | os.PathLike[str]) -> list[RunFolder]:
    """The run folders in ``root``, latest first."""
    root = Path(root)
    if not root.is_dir():
        return []
    runs = [RunFolder(path) for path in root.iterdir() if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda r: (r.config.stat().st_mtime_ns, r.path.name), reverse=True)


def latest_run(root: str | os.PathLike[str]) -> RunFolder | None:
    """The latest run in ``root``, ``None`` when there is none."""
    return next(iter(list_runs(root)), None)


def _cannot_make(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"run folder {str(path)!r} cannot be made: {why}. Choose another with --run-dir."
    )
