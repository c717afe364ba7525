"""The checkpoints of a run: which there are, the newest good one, and getting rid of some."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from paceline.checkpoint.best import Mode, goal_of, metrics_in
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.manifest import MANIFEST, is_old, name_of, step_of
from paceline.checkpoint.retention import Entry, Keep, best_step, to_delete
from paceline.checkpoint.storage.lock import take
from paceline.checkpoint.storage.lock_holder import BEAT_S, FolderLock
from paceline.checkpoint.storage.open import open_storage
from paceline.checkpoint.storage.storage import TEMPORARY
from paceline.errors import CheckpointError


class Folder:
    """The folder at ``where``, a path or a URL; ``options`` and ``digest`` are those of
    ``open_storage``.

    A checkpoint is there if and only if its manifest is. Looking changes nothing and needs no lock.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        options: dict[str, Any] | None = None,
        digest: Digest = XXH3,
    ) -> None:
        self.storage = open_storage(where, options, digest)
        self._lock: FolderLock | None = None
        self._known: dict[int, Entry] = {}

    @property
    def where(self) -> str:
        """Its path or URL."""
        return self.storage.where

    def checkpoints(self) -> list[Checkpoint]:
        """Those that were finished, oldest first, whether or not their bytes are still good."""
        return [self._named(name) for name, finished in self._steps() if finished]

    def unfinished(self) -> list[str]:
        """The names of those that were begun and never finished, oldest first."""
        return [name for name, finished in self._steps() if not finished]

    def old_format(self) -> list[str]:
        """Files of Paceline 0.1, one for each checkpoint, which this version cannot resume."""
        return [name for name in self.storage.names() if is_old(name)]

    def get(self, step: int) -> Checkpoint:
        """The checkpoint of ``step``, which need not be there yet."""
        return self._named(name_of(step))

    def newest_good(
        self,
        on_damage: Callable[[Checkpoint, str], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Checkpoint | None:
        """The newest checkpoint of which every byte is as it was saved; ``None`` if there is none.

        Each one that is damaged is given to ``on_damage``, left as it is and stepped over. Where
        all of them are damaged, that is an error: to begin again would throw the run away.
        """
        said = ""
        for checkpoint in reversed(self.checkpoints()):
            damages = checkpoint.damages(progress)
            if not damages:
                return checkpoint
            more = f" And {len(damages) - 1} more like this." if len(damages) > 1 else ""
            said = f"checkpoint {checkpoint.path}: {damages[0]}{more}"
            if on_damage is not None:
                on_damage(checkpoint, said)
        if said:
            raise CheckpointError(
                f"{said} There is no older one to go on from. To start over, choose another "
                "run_dir."
            )
        return None

    def entries(self) -> list[Entry]:
        """The checkpoints as ``retention`` sees them, with the metrics their manifests name."""
        return [_entry(checkpoint) for checkpoint in self.checkpoints()]

    def best(self, metric: str | None = None, mode: Mode | None = None) -> Checkpoint | None:
        """The best by a metric it was saved with; ``None`` where none has that metric.

        What is not given is what the run was told (``Checkpointing(best=…, mode=…)``); where it
        was told nothing, it has to be given here.
        """
        found = self.checkpoints()
        if not found:
            return None
        goal = goal_of([_info(one) for one in found], metric, mode, self.where)
        entries = [_entry(one) for one in found]
        step = best_step(entries, Keep(metric=goal.metric, mode=goal.mode))
        return next((one for one in found if one.step == step), None)

    def lock(self, owner: str, beat_s: float = BEAT_S) -> FolderLock:
        """Take the folder for one run; ``owner`` says in a few words whose it is.

        Refused, by ``CheckpointError`` with the name of the holder, while another run has it.
        """
        self._lock = take(self.storage, owner, beat_s)
        return self._lock

    def check_lock(self) -> None:
        """Raise ``CheckpointError`` if this run took the lock and does not hold it any more."""
        if self._lock is not None:
            self._lock.check()

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint: its manifest first, so that half of one never looks whole."""
        self._known.pop(checkpoint.step, None)
        self.storage.delete(f"{checkpoint.name}/{MANIFEST}")
        self.storage.delete_folder(checkpoint.name)

    def prune(self, keep: Keep, newest: int | None = None) -> list[int]:
        """Delete what ``retention.to_delete`` says; the steps deleted.

        Called after every save, it reads the manifest of ``newest`` and remembers the others.
        """
        entries = []
        for checkpoint in self.checkpoints():
            if checkpoint.step == newest or checkpoint.step not in self._known:
                self._known[checkpoint.step] = _entry(checkpoint)
            entries.append(self._known[checkpoint.step])
        steps = to_delete(entries, keep, newest)
        for step in steps:
            self.remove(self.get(step))
        return steps

    def clean(self) -> list[str]:
        """Delete what runs that were killed left behind; the names. Only for the lock's holder.

        Unfinished checkpoints, temporary files, and in a finished checkpoint the files of an
        earlier attempt at it. One whose manifest is damaged is left as it is.
        """
        if self._lock is None:
            raise CheckpointError(
                f"{self.where} is not locked by this run: what looks unfinished may be another "
                "run's save in progress. Take the lock first."
            )
        self._lock.check()
        unfinished = self.unfinished()
        for name in unfinished:
            self.storage.delete_folder(name)
        strays = [name for name in self.storage.names() if TEMPORARY.fullmatch(name)]
        for checkpoint in self.checkpoints():
            strays += self._strays(checkpoint)
        for path in strays:
            self.storage.delete(path)
        return unfinished + strays

    def _strays(self, checkpoint: Checkpoint) -> list[str]:
        try:
            known = {MANIFEST, *checkpoint.manifest.files}
        except CheckpointError:
            return []
        found = self.storage.names(checkpoint.name)
        return [f"{checkpoint.name}/{name}" for name in found if name not in known]

    def _named(self, name: str) -> Checkpoint:
        return Checkpoint(self.storage, name)

    def _steps(self) -> list[tuple[str, bool]]:
        """The names of all that are there, oldest first, and whether each was finished."""
        found = ((step_of(name), name) for name in self.storage.names())
        names = [name for _, name in sorted((s, name) for s, name in found if s is not None)]
        sizes = self.storage.sizes([f"{name}/{MANIFEST}" for name in names])
        return [(name, size is not None) for name, size in zip(names, sizes, strict=True)]


def _info(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        info = checkpoint.manifest.info
    except CheckpointError:  # damaged: it says nothing
        return {}
    return info if isinstance(info, dict) else {}


def _entry(checkpoint: Checkpoint) -> Entry:
    try:
        return Entry(checkpoint.step, metrics_in(checkpoint.manifest.info))
    except CheckpointError:  # damaged
        return Entry(checkpoint.step, good=False)
