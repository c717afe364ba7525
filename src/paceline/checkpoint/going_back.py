"""Going back to an earlier checkpoint: those of later steps are set aside, so that none is newer.

The decision is one small file (``.went-back``), written before anything is moved and marked done
at the end. A process that dies in between leaves the rest to the next one that trains here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import MANIFEST, step_of
from paceline.errors import CheckpointError
from paceline.untrusted import parse_json

_FILE = ".went-back"
_ASIDE = re.compile(r"set-aside-([0-9]{1,9})")


@dataclass(frozen=True)
class GoneBack:
    """That a run went back to ``step``: the later ones are in the folder ``into``.

    ``launch`` is the launch that was asked to: its restarts do not go back once more.
    """

    step: int
    into: str
    launch: str
    done: bool = False


def last_gone_back(folder: Folder) -> GoneBack | None:
    """The latest time that the run in ``folder`` went back; ``None`` where it never did."""
    storage = folder.storage
    if storage.size(_FILE) is None:
        return None
    try:
        found = GoneBack(**parse_json(storage.read_bytes(_FILE)))
    except (ValueError, TypeError):
        found = None
    if (
        found is None
        or [type(value) for value in asdict(found).values()] != [int, str, str, bool]
        or not _ASIDE.fullmatch(found.into)
    ):
        raise CheckpointError(
            f"{storage.full(_FILE)} does not say to which step the run went back. It was changed "
            "by something else; delete it to go on from the newest checkpoint."
        )
    return found


def go_back(
    folder: Folder, step: int, launch: str, undo_memory: Callable[[], object]
) -> str | None:
    """Set aside all checkpoints after ``step``; into which folder, ``None`` where there are none.

    Only for the holder of the lock. ``undo_memory`` sees to it that no copy in memory is newer.
    """
    later = _later(folder, step)
    taken = [int(found[1]) for name in folder.storage.names() if (found := _ASIDE.fullmatch(name))]
    going = GoneBack(step, f"set-aside-{max(taken, default=0) + 1}", launch)
    _write(folder, going)
    finish_going_back(folder, undo_memory)
    return folder.storage.full(going.into) if later else None


def finish_going_back(folder: Folder, undo_memory: Callable[[], object]) -> None:
    """Set aside what is still to be, where a run died while it went back."""
    going = last_gone_back(folder)
    if going is None or going.done:
        return
    undo_memory()
    storage = folder.storage
    for name in _later(folder, going.step):
        storage.make_folder(f"{going.into}/{name}")
        # The manifest last: only then is it a checkpoint there.
        for file in sorted(storage.names(name), key=lambda file: file == MANIFEST):
            storage.move(f"{name}/{file}", f"{going.into}/{name}/{file}")
        storage.delete_folder(name)
    _write(folder, replace(going, done=True))


def _later(folder: Folder, step: int) -> list[str]:
    names = folder.storage.names()
    return [name for name in names if (number := step_of(name)) is not None and number > step]


def _write(folder: Folder, going: GoneBack) -> None:
    folder.check_lock()
    folder.storage.replace(_FILE, json.dumps(asdict(going)).encode())
