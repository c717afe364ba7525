"""From ``hvd.init()`` to ``hvd.shutdown()``: who takes part, and what connects them."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from paceline.compat.horovod.common.exceptions import HorovodInternalError, NotInitializedError
from paceline.compat.horovod.runtime.background import Background
from paceline.compat.horovod.runtime.channels import Channels, destroy_group, new_group
from paceline.compat.horovod.runtime.executor import Executor, Submission
from paceline.compat.horovod.runtime.messages import GLOBAL_SET, Request
from paceline.compat.horovod.runtime.settings import read_settings
from paceline.compat.horovod.runtime.wire import Wire
from paceline.launch.environment import read_environment
from paceline.world import World

_PATIENCE = timedelta(days=30)
"""A rank may compute for as long as it likes between two collectives."""


@dataclass(frozen=True)
class Topology:
    """Where this rank is among the ranks and machines of the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


class Session:
    """This rank's part in a Horovod job."""

    _current: ClassVar[Session | None] = None

    def __init__(self, world: World, members: Sequence[int], owns_world: bool) -> None:
        self._world, self._owns_world = world, owns_world
        self._pid = os.getpid()
        rank, size = members.index(world.rank), len(members)
        self._wire_group = (
            new_group(members, "gloo", _PATIENCE, everybody=size) if size > 1 else None
        )
        self.topology = _topology(world, rank, size, self._wire_group)
        self._channels = Channels(rank, members, nccl=world.backend == "nccl")
        self._channels.open(GLOBAL_SET, range(size), world.timeout)
        self.process_sets: dict[int, list[int]] = {GLOBAL_SET: list(range(size))}
        self.executor = Executor(self._channels)
        self.executor.join_device = world.device
        self._failed = False
        self.background = Background(
            rank,
            size,
            None if self._wire_group is None else Wire(self._wire_group),
            self.executor,
            read_settings(),
            self._on_failure,
        )

    @classmethod
    def begin(cls, comm: Sequence[int] | None) -> Session:
        """Join the others. ``comm``: only these ranks of the world, in this order."""
        was_joined = dist.is_initialized()
        world = _join_world()
        members = list(range(world.size)) if not comm else list(comm)
        if world.rank not in members or len(set(members)) < len(members):
            raise ValueError(
                f"hvd.init(comm={members}) on rank {world.rank}: comm must name different ranks of "
                "the world, among them the one that calls."
            )
        session = cls(world, members, owns_world=not was_joined and dist.is_initialized())
        ref = weakref.ref(session)  # a world that lives on is not to keep what has ended
        world.before_close(lambda _patience: _end_if_there(ref()))
        session.background.start()
        cls._current = session
        return session

    @classmethod
    def current(cls) -> Session:
        """The session of this process; raises where ``hvd.init()`` was not called."""
        if cls._current is None:
            raise NotInitializedError
        return cls._current

    @classmethod
    def exists(cls) -> bool:
        """Whether ``hvd.init()`` was called, and ``hvd.shutdown()`` was not."""
        return cls._current is not None

    def end(self) -> None:
        """Leave; what other ranks have outstanding fails there. May be called twice."""
        if Session._current is not self:
            return
        Session._current = None
        if self._pid != os.getpid():  # a forked child has none of the threads
            return
        self.background.shutdown()
        self._channels.close_all()
        if self._wire_group is not None:
            destroy_group(self._wire_group)
            self._wire_group = None
        if self._owns_world:
            self._world.close(failed=self._failed)

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """The id of a new process set; ``None`` where there is one of these ranks already."""
        size = self.topology.size
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
            raise ValueError(
                f"ProcessSet({list(ranks)}): give different ranks of this job, which are 0 to "
                f"{size - 1}."
            )
        added = self._agree("add_process_set", ranks=list(ranks))
        if added < 0:
            return None
        # In the calling thread: the program may make process groups of its own, in this order.
        self._channels.open(added, ranks, self._world.timeout)
        self.process_sets[added] = list(ranks)
        return added

    def remove_process_set(self, process_set: int) -> bool:
        """Whether there was such a process set."""
        ranks = self.process_sets.get(process_set, [])
        removed = self._agree("remove_process_set", ranks=ranks, root=process_set)
        self.process_sets.pop(process_set, None)
        self._channels.close(process_set)
        return removed >= 0

    def _agree(self, kind: str, ranks: list[int], root: int = -1) -> int:
        name = self.background.next_name(kind, GLOBAL_SET)
        request = Request(self.topology.rank, kind, name, ranks=ranks, root=root)
        submission = Submission(request)
        self.background.submit(submission)
        submission.done.wait()
        if submission.error:
            raise HorovodInternalError(submission.error)
        return submission.value

    def _on_failure(self) -> None:
        """Break this rank's connections, so that nobody waits for it in a collective."""
        self._failed = True
        self._channels.close_all()


def _join_world() -> World:
    env = read_environment()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_gpu = gpus > 0 and (env is None or env.local_size <= gpus or env.has_own_gpus)
    if dist.is_initialized():
        return World.init()
    # Horovod's own check for stalls watches over named tensors; see runtime/background.py.
    return World.init(device="auto" if has_gpu else "cpu", hang_after=0)


def _topology(world: World, rank: int, size: int, group: dist.ProcessGroup | None) -> Topology:
    mine = torch.tensor([world.node, world.local_rank])
    places = [torch.empty_like(mine) for _ in range(size)]
    if group is None:
        places = [mine]
    else:
        dist.all_gather(places, mine, group=group)
    where = [(int(node), int(local)) for node, local in places]
    nodes = Counter(node for node, _ in where)
    local_ranks = [
        sum(other_node == node and other < local for other_node, other in where)
        for node, local in where
    ]
    node = where[rank][0]
    same_place = sorted(
        where[other][0] for other in range(size) if local_ranks[other] == local_ranks[rank]
    )
    return Topology(
        rank=rank,
        size=size,
        local_rank=local_ranks[rank],
        local_size=nodes[node],
        cross_rank=same_place.index(node),
        cross_size=len(same_place),
        is_homogeneous=len(set(nodes.values())) == 1,
    )


def _end_if_there(session: Session | None) -> None:
    if session is not None:
        session.end()


@atexit.register
def _end_at_exit() -> None:
    if Session.exists():
        Session.current().end()
