"""A simple checkpoint: one file a step, written by rank 0, whole or not there at all.

The door is kept narrow (``write``, ``latest``, ``read``), so that what lies behind it can change.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError

_STEP_FILE = re.compile(r"step-(\d+)\.pt")
BEST = "best.pt"
FORMAT = 1


def name_of(step: int) -> str:
    """The file name of the checkpoint of ``step``."""
    return f"step-{step:09d}.pt"


def write(
    folder: str | os.PathLike[str], step: int, state: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Save ``state`` as the checkpoint of ``step`` and drop all but the newest ``keep``.

    The file appears under its name only when it is complete and flushed to disk. Nothing older is
    removed before that.
    """
    folder = Path(folder)
    path = folder / name_of(step)
    _write_file(path, state)
    # A newer one is there only if it could not be read: it does not count as kept.
    kept = [old for number, old in _by_step(folder) if number <= step]
    for old in kept[:-keep]:
        old.unlink(missing_ok=True)
    return path


def write_best(folder: str | os.PathLike[str], source: Path) -> Path:
    """Keep a copy of the checkpoint ``source`` as the best so far."""
    best = Path(folder) / BEST
    with _replacing(best) as temporary:
        shutil.copyfile(source, temporary)
    return best


def latest(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in ``folder`` that can be read, or ``None`` when there is none.

    A damaged one is stepped over with a warning that names it. Where all are damaged, that is an
    error: to begin again without a word would throw the run away.
    """
    failure: CheckpointError | None = None
    for _, path in reversed(_by_step(Path(folder))):
        if failure is not None:
            warnings.warn(f"{failure} Trying the one before it.", stacklevel=2)
        try:
            return path, read(path)
        except CheckpointError as error:
            failure = error
    if failure is not None:
        raise CheckpointError(
            f"{failure} There is no older one to go on from. To start over, choose another run_dir."
        )
    return None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load one checkpoint onto the CPU. Never executes code from the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint at {path}.") from error
    except Exception as error:  # torch.load raises whatever the damage makes it trip over
        raise CheckpointError(
            f"checkpoint {path} ({_size(path)} bytes) cannot be read: {type(error).__name__}."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by this version of Paceline.")
    return state


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps for which ``folder`` holds a checkpoint, oldest first."""
    return [step for step, _ in _by_step(Path(folder))]


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    matches = ((_STEP_FILE.fullmatch(path.name), path) for path in folder.glob("step-*.pt"))
    return sorted((int(match[1]), path) for match, path in matches if match)


def _write_file(path: Path, state: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as temporary:
            with open(temporary, "wb") as file:
                torch.save({"format": FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            _check_readable(temporary)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as the latter
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}. Earlier checkpoints are untouched. Free "
            "some space or make the folder writable, then resume."
        ) from error


def _check_readable(path: Path) -> None:
    """Refuse now what :func:`read`, which executes no code from the file, would refuse later."""
    if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise CheckpointError(
            f"the state to save holds {', '.join(sorted(foreign))}, which could not be loaded "
            "without executing code. Let the state_dict of the optimizer, the schedule and the "
            "callbacks hold tensors, numbers, strings, lists and dicts only. Nothing was written."
        )


class _replacing:
    """A temporary name beside ``path`` that becomes ``path`` if the block succeeds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        os.close(handle)
        self.temporary = Path(name)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.temporary.unlink(missing_ok=True)
            return
        os.replace(self.temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself must survive a power cut
        finally:
            os.close(folder)


def _size(path: str | os.PathLike[str]) -> int:
    return Path(path).stat().st_size if Path(path).exists() else 0
