"""What a person means by a place: a run folder, its checkpoints, one checkpoint, a URL.

Imports no torch, so that a command that only looks answers at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.manifest import NAME
from paceline.checkpoint.names import is_old, step_of
from paceline.checkpoint.storage.local import Storage, open_storage
from paceline.errors import CheckpointError
from paceline.launch.run_folder import latest_run

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoint import Checkpoint
    from paceline.checkpoint.folder import Folder

_SHOWN = 20


@dataclass(frozen=True)
class Place:
    """A folder of checkpoints, and the ``name`` of the one in it that was meant, if one was.

    ``options`` are those that the storage behind a URL is opened with.
    """

    folder: str
    name: str | None = None
    options: dict[str, Any] | None = None

    def open(self) -> Storage:
        """The storage that the checkpoints are in."""
        return open_storage(self.folder, self.options)


def locate(where: str | os.PathLike[str]) -> Place:
    """The checkpoints that ``where`` stands for.

    It may be a run folder, the folder of its checkpoints, or one checkpoint; as a path or a URL.
    """
    text = os.fspath(where)
    if is_url(text):
        return _locate_url(text.rstrip("/"), None)
    path = Path(text.removeprefix("file://"))
    _check_folder(path)
    if step_of(path.absolute().name) is not None or (path / NAME).is_file():
        return Place(str(path.absolute().parent), path.absolute().name)
    if elsewhere := _place_in_config(path):
        return elsewhere
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and (folder != path or _holds_checkpoints(os.listdir(folder))):
            return Place(str(folder))
    if (path / "config.yaml").is_file() or path.name == "checkpoints":
        return Place(str(path))  # a run that has not saved yet
    run = latest_run(path)
    hint = f" The latest run in it is {run}." if run else ""
    raise CheckpointError(
        f"{text} is no run folder and holds no checkpoints.{hint} Name a run folder, its "
        "checkpoints folder, one checkpoint (…/step-000000100), or a URL."
    )


def find_folder(where: str | os.PathLike[str]) -> Folder:
    """The folder of checkpoints that ``where`` stands for; see :func:`locate`."""
    from paceline.checkpoint.folder import Folder

    place = locate(where)
    return Folder(place.folder, place.options)


def find_checkpoint(where: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """One checkpoint: the one that ``where`` names, else that of ``step``, else the newest."""
    from paceline.checkpoint.checkpoint import Checkpoint
    from paceline.checkpoint.folder import Folder

    place = locate(where)
    if place.name is not None:
        checkpoint = Checkpoint(place.open(), place.name)
        if step is not None and checkpoint.step != step:
            raise CheckpointError(
                f"{checkpoint.path} is the checkpoint of step {checkpoint.step}, not {step}. Leave "
                "the step out, or name the folder of all checkpoints."
            )
        return checkpoint
    folder = Folder(place.folder, place.options)
    found = folder.checkpoints()
    if not found:
        raise CheckpointError(f"{folder.where} holds no checkpoint.{_hint(folder)}")
    if step is None:
        return found[-1]
    chosen = next((one for one in found if one.step == step), None)
    if chosen is None:
        raise CheckpointError(
            f"{folder.where} holds no checkpoint of step {step}; it has {_steps(found)}."
        )
    return chosen


def _check_folder(path: Path) -> None:
    if path.is_dir():
        return
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    hint = "Name a run folder or a checkpoint's folder."
    if path.name == NAME:
        hint = f"Name the folder it is in: {path.parent}"
    elif path.suffix in (".pt", ".pth", ".bin", ".safetensors"):
        hint = f"Make a checkpoint of it: paceline checkpoint import {path} TARGET"
    raise CheckpointError(f"{path} is a file, not a folder of checkpoints. {hint}")


def _locate_url(url: str, options: dict[str, Any] | None) -> Place:
    above, _, name = url.rpartition("/")
    if step_of(name) is not None:
        return Place(above, name, options)
    names = open_storage(url, options).names()
    if NAME in names:
        return Place(above, name, options)
    if not _holds_checkpoints(names) and "checkpoints" in names:
        return Place(f"{url}/checkpoints", None, options)
    if not names:
        raise CheckpointError(f"{url} does not exist, or is empty.")
    return Place(url, None, options)


def _place_in_config(path: Path) -> Place | None:
    """Where the run in this folder saves, if its config names another place than the folder."""
    config = path / "config.yaml"
    if not config.is_file():
        return None
    import yaml

    try:
        read = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{config} cannot be read: {error}.") from error
    section = read.get("checkpoint") if isinstance(read, dict) else None
    if not isinstance(section, dict) or not isinstance(where := section.get("where"), str):
        return None
    if is_url(where):
        return _locate_url(where.rstrip("/"), section.get("storage"))
    return Place(str(path / where))  # a relative one is in the run's folder


def is_url(where: str) -> bool:
    """Whether ``where`` is a URL of anything but this machine's files."""
    return "://" in where and not where.startswith("file://")


def _holds_checkpoints(names: list[str]) -> bool:
    return any(step_of(name) is not None or is_old(name) for name in names)


def _steps(found: list[Checkpoint]) -> str:
    steps = [str(one.step) for one in found]
    left_out = len(steps) - _SHOWN
    shown = steps if left_out <= 0 else [f"{left_out} older ones", *steps[-_SHOWN:]]
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(shown)}"


def _hint(folder: Folder) -> str:
    if old := folder.old_format():
        return (
            f" {old[-1]} is of Paceline 0.1: bring its weights over with paceline checkpoint "
            f"import {folder.storage.full(old[-1])} TARGET"
        )
    if unfinished := folder.unfinished():
        return f" {unfinished[-1]} was begun and never finished."
    return ""
