"""The checkpoints of a run: an engine's state and what goes with it, saved and found again."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint.best import best_info
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.engine_names import (
    SavedBelow,
    add_engine,
    check_engines,
    layouts_in_words,
    named_engines,
)
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.going_back import finish_going_back, go_back, last_gone_back
from paceline.checkpoint.hashing import Digest, make_digest
from paceline.checkpoint.locate import Which, check_which, choose
from paceline.checkpoint.memory.checkpoint import MemoryCheckpoint
from paceline.checkpoint.memory.find import OWN_MEMORY, PARTNER_MEMORY, snapshots_in_memory
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.nested_tensors import is_large, put_together, take_apart
from paceline.checkpoint.rank_state import Part, RankState, empty_for, held_part, whole_part
from paceline.checkpoint.restore import (
    CheckpointDoesNotFit,
    OpenedCheckpoint,
    fill,
    first_problem,
    on_all_ranks,
)
from paceline.checkpoint.restore_order import RestoreAttempt, RestoreCandidate, restore_newest
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.saveable import SavedEngine, Stateful, checked_objects
from paceline.checkpoint.sharded.async_saver import AsyncSaver, SaveOutcome
from paceline.data.loader import Loader
from paceline.errors import CheckpointDamaged, CheckpointError, ConfigError
from paceline.events import Event, Note, RestoreTried
from paceline.events.wording import checkpoint_trouble
from paceline.options import Checkpointing
from paceline.version import __version__
from paceline.world import collectives, rng_state, set_rng_state

T = TypeVar("T")
OBJECTS = "user/"
_LOADER, _RANDOM = "loader", "random/"
_IDENTITY = ".run"
"""A file beside the checkpoints that tells apart runs that used the folder one after the other."""


@dataclass(frozen=True)
class Restored:
    """What a run goes on from."""

    step: int
    path: str
    info: dict[str, Any]
    has_random: bool
    """Whether each rank's random streams go on, too: the world has the size it had then."""
    set_aside: str | None = None
    """Where the checkpoints of later steps are now, if the run went back and there were any."""


class Checkpoints:
    """Saves engines, their data's position, random streams and objects of yours; restores them.

    For a loop of your own (the ``paceline.Trainer`` has one inside). Every rank makes it and
    calls its methods at the same steps:

        checkpoints = paceline.Checkpoints("runs/mine/checkpoints", engine, loader=loader)
        checkpoints.restore()
        for batch in loader:
            engine.step(batch)
            if engine.steps_done % 100 == 0:
                checkpoints.save()
        checkpoints.close()

    Args:
        where: a folder or a URL such as ``s3://bucket/run``.
        engine: the engine to save; or several by name, such as ``{"generator": g,
            "discriminator": d}``, which are saved and restored together. The step of such a
            checkpoint is that of the engine that has done most.
        loader: where it is in the data.
        objects: by name: anything with ``state_dict`` and ``load_state_dict``. Of an object that
            is not the same on all ranks, rank 0's is saved.
        options: what is kept, and how; its ``every…`` are the trainer's.
        report: is given each event (a rung of the ladder that was tried).
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        engine: SavedEngine | Mapping[str, SavedEngine],
        *,
        loader: Stateful | None = None,
        objects: Mapping[str, Stateful] | None = None,
        options: Checkpointing = Checkpointing(),
        report: Callable[[Event], None] | None = None,
    ) -> None:
        self.engines = named_engines(engine)
        self.engine, self.options = next(iter(self.engines.values())), options
        self._world = self.engine.world
        if isinstance(loader, Loader):
            loader.follow(self.engine.layout)
        self._stateful = {OBJECTS + name: o for name, o in checked_objects(objects or {}).items()}
        if loader is not None:
            self._stateful[_LOADER] = loader
        self._report = report or self._warn
        self._digest = _agreed_digest(options)
        storage = dict(options.storage) if options.storage else None
        self.folder = Folder(where, storage, self._digest)
        self._held = contextlib.ExitStack()
        self._take_folder()
        best = options.keep_best if options.best is not None else 0
        self._saver = AsyncSaver(
            self.folder,
            self._world.background_group("checkpoint"),
            Keep(
                last=options.keep,
                best=best,
                mode=options.direction,
                metric=options.best,
                every=options.keep_every,
            ),
        )
        self._memory: MemorySnapshots | None = None  # made when it is first used
        self._restored_step: int | None = None
        self._identity: str | None = None
        self._begun: list[tuple[str, float]] = []
        self._done: list[SaveOutcome] = []

    def add(self, name: str, saved: Stateful) -> None:
        """Save something of the trainer's own under ``name``."""
        self._stateful[name] = saved

    # ------------------------------------------------------------------ saving

    @property
    def step(self) -> int:
        """The step that a checkpoint of now would have."""
        return max(engine.steps_done for engine in self.engines.values())

    def _settle(self) -> None:
        for engine in self.engines.values():
            engine.settle()

    def save(
        self,
        *,
        reason: str = "asked",
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> float:
        """Save the state as of this step; returns how many seconds the run stood still for it.

        Every rank calls it. Writing goes on in the background unless ``wait`` is set or the
        options say otherwise: ``finished`` tells how it ended.
        """
        started = time.perf_counter()
        self._settle()
        self.begin()
        state = self._collect()
        self._saver.save(self.step, state, {**self._info(reason, metrics or {}), **(info or {})})
        if wait or not self.options.asynchronous:
            self._done += self._saver.wait()
        stalled = time.perf_counter() - started
        self._begun.append((reason, stalled))
        return stalled

    def snapshot(self) -> None:
        """Keep a copy of the state as of this step in memory that outlives the process.

        Every rank calls it. Raises ``CheckpointError``, on all of them, where there is no room.
        ``restore`` looks for it where the options have a ``memory_every``; without one there
        would be no use in it, and it is refused.
        """
        if self.options.memory_every is None:
            raise CheckpointError(
                "snapshot(): without memory_every no snapshot in memory is ever read. Make the "
                "checkpoints with options=Checkpointing(memory_every=1)."
            )
        self._settle()
        self.begin()
        if self._memory is None:
            self._memory = MemorySnapshots(
                self.folder.where,
                self._world.background_group("memory"),
                after=self._restored_step,
                identity=self._identity or "",
                digest=self._digest,
            )
        self._memory.snapshot(self.step, self._collect(), self._info("memory", {}))

    def reserve(self) -> None:
        """Get the memory for the copies now, so that the first save is as fast as any other.

        Every rank calls it, after a step. Where there is no room, the save will tell.
        """
        with contextlib.suppress(CheckpointError):
            self._saver.reserve(self._collect())

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        self._done += self._saver.finished()
        return len(self._done) < len(self._begun)

    def finished(self, *, wait: bool = False) -> list[tuple[SaveOutcome, str, float]]:
        """The saves that ended since the last call: outcome, reason, seconds the run stood still.

        An outcome with an ``error`` is a save that failed, on all ranks alike.
        """
        self._done += self._saver.wait() if wait else self._saver.finished()
        ended, self._done = self._done, []
        return [(outcome, *self._begun.pop(0)) for outcome in ended]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(clean=kind is None)

    def close(self, *, clean: bool = True) -> None:
        """Wait for what is being written and let go of the folder.

        ``clean``: the run ended in good order, and its copies in memory can go, too.
        """
        with self._held:  # lets go of the folder, whatever happens
            try:
                self._done += self._saver.close()
                for outcome, reason, _ in self.finished():
                    if outcome.error is not None:
                        warnings.warn(f"checkpoint ({reason}): {outcome.error}", stacklevel=2)
            finally:
                self._leave_memory(clean)

    def _leave_memory(self, clean: bool) -> None:
        if self._memory is None:
            return
        if clean:
            self._memory.free()
            return
        with contextlib.suppress(CheckpointError):  # the run has a trouble of its own to tell
            self._memory.close()

    def _collect(self) -> RankState:
        state = RankState()
        for name, engine in self.engines.items():
            add_engine(state, engine.rank_state.collect(), name)
        is_main = self._world.is_main
        for name, saved in self._stateful.items():
            tree, tensors = take_apart(saved.state_dict(), _is_apart)
            if is_main:
                state.objects[name] = tree
            for path, tensor in tensors.items():
                if isinstance(tensor, DTensor):
                    state.tensors[f"{name}/{path}"] = held_part(tensor)
                elif is_main:
                    state.tensors[f"{name}/{path}"] = whole_part(tensor)
        state.objects[f"{_RANDOM}{self._world.rank}"] = rng_state()
        return state

    def _info(self, reason: str, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "layout": layouts_in_words(self.engines),
            "world_size": self._world.size,
            "reason": reason,
            "metrics": dict(metrics),
            **best_info(self.options.best, self.options.direction),
            "paceline": __version__,
            "torch": torch.__version__,
        }

    # ------------------------------------------------------------------ restoring

    def restore(self, which: Which | None = None) -> Restored | None:
        """Go on from the newest state that is whole; ``None`` where there is none at all.

        Memory of this node, memory of a partner node, then checkpoints from the newest to the
        oldest. A damaged one is stepped over; where all are, that is an error. Every rank calls
        it, and all take the same.

        ``which``: go back to ``"best"``, by the metric that the run was told, or to the checkpoint
        of a step. That one is loaded, or it is an error and nothing has changed. Those of later
        steps are then moved into a folder ``set-aside-1`` beside it (the next time
        ``set-aside-2``), so that the run goes on as if it had never been further. Where the
        launcher starts the ranks again afterwards, they go on from the newest state.
        ``"last"`` is as without it.
        """
        check_which(which)
        if which not in (None, "last") and not self._from_main(self._is_back):
            return self._go_back(which)
        try:
            restored = restore_newest(self._rungs(), self._tried, agree=first_problem)
        except CheckpointDoesNotFit as error:
            raise error.reason from None
        if restored is None and (old := self._from_main(self.folder.old_format)):
            raise CheckpointError(
                f"{self.folder.where} holds {old[-1]}, written by Paceline 0.1, which this version "
                "cannot resume. `paceline checkpoint import` takes over its weights."
            )
        if restored is None:
            self._identity = None
        else:
            self._restored_step = restored.step
        return restored

    def _is_back(self) -> bool:
        """Whether an earlier start of this launch has gone back already."""
        if self._world.restart_count == 0:
            return False
        last = last_gone_back(self.folder)
        return last is not None and last.launch == self._world.launch_id

    def _go_back(self, which: Which | None) -> Restored:
        """Load that one checkpoint, and set those of later steps aside."""
        step = self._from_main(lambda: choose(self.folder, which).step)
        only = functools.partial(self._attempt, functools.partial(self.folder.get, step))
        began = time.monotonic()
        try:
            restored, problem = only(), None
        except CheckpointDoesNotFit as error:
            raise error.reason from None
        except CheckpointError as error:
            restored, problem = None, str(error)
        problem = first_problem(problem)
        seconds = time.monotonic() - began
        self._tried(RestoreAttempt("checkpoint", step, problem is None, problem or "", seconds))
        if restored is None or problem is not None:
            raise CheckpointError(
                f"{problem} The run was to go back to it: nothing was changed. Choose another step."
            )
        launch = self._world.launch_id
        aside = self._from_main(lambda: go_back(self.folder, step, launch, self._new_identity))
        self._identity = self._from_main(self._read_identity)
        self._restored_step = restored.step
        told = f"went back to step {step}"
        if aside is not None:
            told += f": the checkpoints of later steps are in {aside} now; delete it to make room"
        self._report(Note(message=told))
        return dataclasses.replace(restored, set_aside=aside)

    def _rungs(self) -> list[RestoreCandidate[Restored]]:
        """All there is to go on from; of what is of the same step, the fastest first."""
        rungs = self._memory_rungs()
        # Rank 0 looks: ranks on other machines may not see a new folder yet, and all must agree.
        for step in self._from_main(lambda: [c.step for c in self.folder.checkpoints()])[::-1]:
            found = functools.partial(self.folder.get, step)
            rungs.append(
                RestoreCandidate("checkpoint", step, functools.partial(self._attempt, found))
            )
        return rungs

    def _memory_rungs(self) -> list[RestoreCandidate[Restored]]:
        if self.options.memory_every is None:
            # Nothing there is read, and once this run has saved, nothing there is of its history.
            self._identity = None
            return []
        self._identity = self._from_main(self._read_identity)
        problems: list[str] = []
        try:
            held = snapshots_in_memory(
                self.folder.where,
                self._world.background_group("memory"),
                identity=self._identity,
                on_problem=problems.append,
                digest=self._digest,
            )
        except CheckpointError as error:  # no shared memory here, on any rank alike
            held, problems = [], [str(error)]
        for problem in problems or ([] if held else ["there is no snapshot"]):
            self._tried(RestoreAttempt(OWN_MEMORY, None, False, problem, 0.0))
        rungs: list[RestoreCandidate[Restored]] = []
        for one in held:
            own = functools.partial(self._attempt, functools.partial(one.open, copies=False))
            rungs.append(RestoreCandidate(OWN_MEMORY, one.step, own))
            if one.has_copies:
                rungs.append(
                    RestoreCandidate(
                        PARTNER_MEMORY, one.step, functools.partial(self._attempt, one.open)
                    )
                )
        return rungs

    def _tried(self, tried: RestoreAttempt) -> None:
        self._report(RestoreTried(**dataclasses.asdict(tried)))

    def _warn(self, event: Event) -> None:
        """Where nobody wants the events, what is stepped over is at least warned of."""
        if self._world.is_main and (told := checkpoint_trouble(event)) is not None:
            warnings.warn(told, stacklevel=5)

    def _attempt(self, find: Callable[[], Checkpoint]) -> Restored:
        """Take over one checkpoint; raises CheckpointDamaged, on all ranks, if it is not whole."""
        checkpoint = find()
        try:
            opened = on_all_ranks(lambda: OpenedCheckpoint(checkpoint, self._wanted))
            load = functools.partial(fill, self._world, checkpoint)
            check_engines(checkpoint, self.engines)
            for name, engine in self.engines.items():
                saved = SavedBelow(opened, name)
                engine.rank_state.take(saved, saved.load_by(load))
            self._restore_objects(opened, load)
        except CheckpointDamaged:
            raise
        except CheckpointError as error:
            raise CheckpointDoesNotFit(error) from error
        finally:
            is_pending = any(engine.rank_state.is_pending for engine in self.engines.values())
            if isinstance(checkpoint, MemoryCheckpoint) and not is_pending:
                checkpoint.close()
        own = f"{_RANDOM}{self._world.rank}"
        has_random = opened.manifest.info.get("world_size") == self._world.size
        if has_random and own in opened.manifest.objects:
            set_rng_state(opened.read_object(own))
        return Restored(self.step, checkpoint.path, opened.manifest.info, has_random)

    def _wanted(self, name: str) -> bool:
        return not name.startswith(_RANDOM) or name == f"{_RANDOM}{self._world.rank}"

    def _restore_objects(
        self, opened: OpenedCheckpoint, load: Callable[[dict[str, Part]], None]
    ) -> None:
        tensors = opened.manifest.tensors
        found: dict[str, dict[str, Tensor]] = {}
        parts: dict[str, Part] = {}
        for name, saved in self._stateful.items():
            if name not in opened.manifest.objects:
                continue
            prefix = f"{name}/"
            inside = [stored for stored in tensors if stored.startswith(prefix)]
            like = take_apart(saved.state_dict(), _is_apart)[1] if inside else {}
            found[name] = {}
            for stored in inside:
                path = stored.removeprefix(prefix)
                found[name][path] = empty_for(tensors[stored], like.get(path))
                parts[stored] = held_part(found[name][path])
        if parts:
            load(parts)
        for name, own in found.items():
            self._stateful[name].load_state_dict(put_together(opened.read_object(name), own))

    def _take_folder(self) -> None:
        """Keep other runs out, and remove what a killed one left half done."""

        def take() -> None:
            with contextlib.ExitStack() as held:
                held.enter_context(self.folder.lock("training"))
                finish_going_back(self.folder, self._new_identity)
                self.folder.clean()
                self._held = held.pop_all()

        self._from_main(take)

    @property
    def has_begun(self) -> bool:
        """Whether the folder has been told apart from that of an earlier run."""
        return self._identity is not None

    def begin(self) -> None:
        """Before the first save of a run that went on from nothing: nobody else's memory is its.

        Every rank calls it; saves do where nobody has. Raises ``CheckpointError``, on all ranks,
        where the folder cannot be written.
        """
        if self._identity is None:
            self._identity = self._from_main(self._new_identity)

    def _new_identity(self) -> str:
        made = secrets.token_hex(8)
        self.folder.storage.replace(_IDENTITY, made.encode())
        return made

    def _read_identity(self) -> str:
        storage = self.folder.storage
        return "" if storage.size(_IDENTITY) is None else storage.read_bytes(_IDENTITY).decode()

    def _from_main(self, action: Callable[[], T]) -> T:
        """What ``action`` gives on rank 0, on every rank; where it fails, it fails on all."""
        failure, result = None, None
        if self._world.is_main:
            try:
                result = action()
            except CheckpointError as error:
                failure = str(error)
        failure, result = collectives.broadcast_object((failure, result))
        if failure is not None:
            raise CheckpointError(failure)
        return cast(T, result)


def _agreed_digest(options: Checkpointing) -> Digest:
    """How all ranks hash; raises, on all of them, where one lacks the key or has another."""
    if options.digest_key is None:
        return make_digest(options.digest)

    def read() -> Digest:
        try:
            return make_digest(options.digest, options.digest_key)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None

    digest = on_all_ranks(read)
    if len(found := set(collectives.all_gather_object(digest.key_id))) > 1:
        raise CheckpointError(
            f"{options.digest_key} is not the same key on all ranks ({', '.join(sorted(found))}). "
            "Give every machine of the run the same."
        )
    return digest


def _is_apart(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or is_large(tensor)
