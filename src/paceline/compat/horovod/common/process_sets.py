"""Process sets: ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.compat.horovod.runtime.session import Session
from paceline.compat.horovod.runtime.settings import is_set

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


class ProcessSet:
    """Some ranks, for ``hvd.init(process_sets=…)`` or ``hvd.add_process_set``.

    ``process_set_id`` is ``None`` until then, and again after ``hvd.remove_process_set``.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            raise ValueError(
                f"ProcessSet({ranks_or_comm!r}): give a list of ranks. MPI communicators are not "
                "supported, since MPI is not used."
            ) from None
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks}): a process set is a list of ranks, as numbers.")
        self.ranks = ranks

    def size(self) -> int | None:
        """How many ranks it has; ``None`` while it is not in use."""
        if self.process_set_id is None:
            return None
        return len(self._members())

    def rank(self) -> int | None:
        """This process's place among its ranks; ``None`` while it is not in use."""
        if self.process_set_id is None:
            return None
        members, rank = self._members(), Session.current().topology.rank
        if rank not in members:
            raise ValueError("Process is not part of provided process set.")
        return members.index(rank)

    def included(self) -> bool | None:
        """Whether this process is one of its ranks."""
        if self.ranks is None:
            return None
        return Session.current().topology.rank in self.ranks

    def invalidate(self) -> None:
        """Take it out of use."""
        self.process_set_id = None

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    def _members(self) -> list[int]:
        assert self.process_set_id is not None
        sets = Session.current().process_sets
        if self.process_set_id not in sets:
            raise ValueError("Process set does not exist or has not been registered.")
        return sets[self.process_set_id]


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set after ``hvd.init()``. **Every** rank must call this, members or not.

    Needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1``, or ``hvd.init(process_sets="dynamic")``.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    session = Session.current()
    _require_dynamic("adding")
    return register(session, process_set)


def register(session: Session, process_set: ProcessSet) -> ProcessSet:
    """Agree with all ranks on a new process set."""
    assert process_set.ranks is not None
    added = session.add_process_set(process_set.ranks)
    if added is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = added
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of use, on **every** rank; returns whether there was one."""
    process_set_id = process_set.process_set_id
    if process_set_id is None or process_set_id == 0:
        return False
    session = Session.current()
    _require_dynamic("removing")
    process_set.invalidate()
    return session.remove_process_set(process_set_id)


def _require_dynamic(doing: str) -> None:
    if not is_set(_DYNAMIC):
        raise ValueError(
            f"Set {_DYNAMIC}=1 to allow {doing} process sets after Horovod initialization."
        )
