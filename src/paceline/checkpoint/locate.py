"""What a person means by a place: a run folder, its checkpoints, one checkpoint, a URL.

Imports no torch, so that a command that only looks answers at once.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.checkpoint.best import Mode
from paceline.checkpoint.hashing import XXH3, Digest, with_key
from paceline.checkpoint.manifest import MANIFEST, is_old, step_of
from paceline.checkpoint.storage.open import is_url, open_storage
from paceline.checkpoint.storage.storage import Storage
from paceline.errors import CheckpointError, ConfigError
from paceline.launch.run_folder import latest_run
from paceline.untrusted import MOST_CONFIG_BYTES, read_text

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoint import Checkpoint
    from paceline.checkpoint.folder import Folder

Which = int | Literal["best", "last"]
"""One of the checkpoints of a run: by its step, or by what it is."""
_SHOWN = 20
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Location:
    """A folder of checkpoints, and the ``name`` of the one in it that was meant, if one was.

    ``options`` and ``digest`` are those that the storage is opened with.
    """

    folder: str
    name: str | None = None
    options: dict[str, Any] | None = None
    digest: Digest = XXH3

    def open(self) -> Storage:
        """The storage that the checkpoints are in."""
        return open_storage(self.folder, self.options, self.digest)


def locate(
    where: str | os.PathLike[str], *, follow: bool = False, key: str | None = None
) -> Location:
    """The checkpoints that ``where`` stands for.

    It may be a run folder, the folder of its checkpoints, or one checkpoint; as a path or a URL.
    A run folder may come from anybody: where its config says that the checkpoints are elsewhere,
    in a store or another folder, that place is looked at only where ``follow`` is set.

    ``key`` (``env:MANIFEST`` or ``file:/path``): only what was written with this key is taken.
    """
    place = _locate(os.fspath(where), follow)
    return place if key is None else dataclasses.replace(place, digest=with_key(key))


def _locate(text: str, follow: bool) -> Location:
    if is_url(text):
        return _locate_url(text.rstrip("/"), None)
    path = Path(text.removeprefix("file://"))
    _check_folder(path)
    if step_of(path.absolute().name) is not None or (path / MANIFEST).is_file():
        return Location(str(path.absolute().parent), path.absolute().name)
    if elsewhere := _place_in_config(path, follow):
        return elsewhere
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and (folder != path or _holds_checkpoints(os.listdir(folder))):
            if not follow and not _is_inside(folder, path):
                raise _not_followed(f"{folder} is a link to", os.path.realpath(folder), None)
            return Location(str(folder))
    if (path / "config.yaml").is_file() or path.name == "checkpoints":
        return Location(str(path))  # a run that has not saved yet
    run = latest_run(path)
    hint = f" The latest run in it is {run}." if run else ""
    raise CheckpointError(
        f"{text} is no run folder and holds no checkpoints.{hint} Name a run folder, its "
        "checkpoints folder, one checkpoint (…/step-000000100), or a URL."
    )


def find_folder(
    where: str | os.PathLike[str], *, follow: bool = False, key: str | None = None
) -> Folder:
    """The folder of checkpoints that ``where`` stands for; see ``locate``."""
    from paceline.checkpoint.folder import Folder

    place = locate(where, follow=follow, key=key)
    return Folder(place.folder, place.options, place.digest)


def find_checkpoint(
    where: str | os.PathLike[str],
    which: Which | None = None,
    *,
    metric: str | None = None,
    mode: Mode | None = None,
    follow: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """One checkpoint: the one that ``where`` names, or one of those that it stands for.

    ``which`` of them: that of a step, ``"last"`` (the newest, as without it), or ``"best"``, by
    the metric and in the direction that the run was told, unless ``metric`` and ``mode`` say
    otherwise. For ``follow`` and ``key`` see ``locate``.
    """
    from paceline.checkpoint.checkpoint import Checkpoint
    from paceline.checkpoint.folder import Folder

    check_which(which, metric, mode)
    place = locate(where, follow=follow, key=key)
    if place.name is not None:
        return _the_one(Checkpoint(place.open(), place.name), which)
    return choose(Folder(place.folder, place.options, place.digest), which, metric, mode)


def choose(
    folder: Folder,
    which: Which | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
) -> Checkpoint:
    """The one of a folder's checkpoints that is meant; see ``find_checkpoint``."""
    check_which(which, metric, mode)
    found = folder.checkpoints()
    if not found:
        raise CheckpointError(f"{folder.where} holds no checkpoint.{_hint(folder)}")
    if which in (None, "last"):
        return found[-1]
    if which == "best":
        return _best(folder, metric, mode)
    chosen = next((one for one in found if one.step == which), None)
    if chosen is None:
        raise CheckpointError(
            f"{folder.where} holds no checkpoint of step {which}; it has {_steps(found)}."
        )
    return chosen


def check_which(which: Any, metric: str | None = None, mode: str | None = None) -> None:
    """Refuse what names no checkpoint, and a metric where not the best is asked for."""
    number = isinstance(which, int) and not isinstance(which, bool) and which >= 0
    if which not in (None, "last", "best") and not number:
        raise CheckpointError(f"which={which!r}: it is 'best', 'last' or the number of a step.")
    if which != "best" and (metric, mode) != (None, None):
        raise CheckpointError(
            f"a metric or mode ({metric or mode}) is for the best checkpoint: ask for the best."
        )


def which_named(text: str) -> Which:
    """``--which best|last|STEP`` of a command line."""
    if text == "best":
        return "best"
    if text == "last":
        return "last"
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"--which {text}: it is best, last or the number of a step")
    return int(text)


def _the_one(checkpoint: Checkpoint, which: Which | None) -> Checkpoint:
    """A checkpoint that was named by itself, if it is the one that is wanted."""
    if which == "best":
        raise CheckpointError(
            f"{checkpoint.path} is one checkpoint: to have the best, name the run or the folder of "
            "all its checkpoints."
        )
    if isinstance(which, int) and checkpoint.step != which:
        raise CheckpointError(
            f"{checkpoint.path} is the checkpoint of step {checkpoint.step}, not {which}. Leave "
            "the step out, or name the folder of all checkpoints."
        )
    return checkpoint


def _best(folder: Folder, metric: str | None, mode: Mode | None) -> Checkpoint:
    found = folder.best(metric, mode)
    if found is None:
        named = "its metric" if metric is None else f"the metric {metric!r}"
        raise CheckpointError(f"{folder.where} holds no checkpoint that was saved with {named}.")
    return found


def _check_folder(path: Path) -> None:
    if path.is_dir():
        return
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    hint = "Name a run folder or a checkpoint's folder."
    if path.name == MANIFEST:
        hint = f"Name the folder it is in: {path.parent}"
    elif path.suffix in (".pt", ".pth", ".bin", ".safetensors"):
        hint = f"Make a checkpoint of it: paceline checkpoint import {path} TARGET"
    raise CheckpointError(f"{path} is a file, not a folder of checkpoints. {hint}")


def _locate_url(url: str, options: dict[str, Any] | None) -> Location:
    above, _, name = url.rpartition("/")
    if step_of(name) is not None:
        return Location(above, name, options)
    names = open_storage(url, options).names()
    if MANIFEST in names:
        return Location(above, name, options)
    if not _holds_checkpoints(names) and "checkpoints" in names:
        return Location(f"{url}/checkpoints", None, options)
    if not names:
        raise CheckpointError(f"{url} does not exist, or is empty.")
    return Location(url, None, options)


def _place_in_config(path: Path, follow: bool) -> Location | None:
    """Where the run in this folder saves, if its config names another place than the folder."""
    config = path / "config.yaml"
    if not config.is_file():
        return None
    read = read_run_config(config)
    section = read.get("checkpoint") if isinstance(read, dict) else None
    if not isinstance(section, dict) or not isinstance(where := section.get("where"), str):
        return None
    options = section.get("storage")
    says = f"{config} says that the checkpoints of this run are at"
    if is_url(where):
        if not follow:
            raise _not_followed(says, where, options)
        return _locate_url(where.rstrip("/"), options if isinstance(options, dict) else None)
    there = path / where.removeprefix("file://")  # a relative one is in the run's folder
    if not follow and not _is_inside(there, path):
        raise _not_followed(says, os.path.abspath(there), None)
    # Absolute where the name of a folder might be taken for a URL.
    return Location(os.path.abspath(there) if is_url(str(there)) else str(there))


def _is_inside(place: Path, folder: Path) -> bool:
    """Whether ``place`` lies in ``folder``, with all links followed."""
    inner, outer = os.path.realpath(place), os.path.realpath(folder)
    return os.path.commonpath([inner, outer]) == outer


def _not_followed(says: str, where: str, options: Any) -> CheckpointError:
    """A config may be anybody's: it does not make us connect to a place of its choosing."""
    from paceline.masking import masked  # loads all of the config's schema

    through = ""
    if isinstance(options, dict) and options:
        endpoint = masked(str(options.get("endpoint_url") or ""))
        said = (
            f"endpoint_url {endpoint!r}" if endpoint else f"options {', '.join(map(str, options))}"
        )
        through = f" (storage {said})"
    place = f"{masked(where)!r}{through}"
    return CheckpointError(
        f"{says} {place}. That is outside of the run's folder, and was not looked at: a folder "
        "that came from others could name any place. Where you trust it, go there with --follow "
        "(in Python: follow=True), or name the place itself."
    )


def read_run_config(path: Path) -> Any:
    """What the config of a run says, unchecked: only to look a few things up in it."""
    from paceline.config import yaml_file

    try:
        return yaml_file.read(read_text(path, MOST_CONFIG_BYTES), str(path))[0]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be read: {'; '.join(error.problems)}.") from error


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
