"""Groups: the ranks that take part in a collective, and how their bytes travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import WorldError


class Group:
    """Some ranks of a world, in ascending order; made by ``World.group``.

    ``process_group`` is torch's own object, for code that talks to ``torch.distributed``
    directly; it is ``None`` in a world of one and on ranks that are not members.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        world_rank: int,
        process_group: dist.ProcessGroup | None,
        cpu_group: dist.ProcessGroup | None,
        timeout: timedelta,
        checks: bool,
    ) -> None:
        self.ranks = tuple(ranks)
        self.process_group = process_group
        self._cpu_group = cpu_group
        self._world_rank = world_rank
        self._timeout = timeout
        self._checks = checks
        self._calls = 0
        self._closed = False
        self._backends = {} if process_group is None else backend_by_device(process_group)

    @property
    def size(self) -> int:
        """How many ranks are members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's place among the members, from 0; refused when it is not a member."""
        self.require_member("rank")
        return self.ranks.index(self._world_rank)

    def contains(self, rank: int) -> bool:
        """Whether the world's rank ``rank`` is a member."""
        return rank in self.ranks

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def __repr__(self) -> str:
        return f"Group({list(self.ranks)})"

    def require_member(self, call: str) -> None:
        """Raise unless this process may use the group."""
        if self._closed:
            raise WorldError(
                f"{call}: the world of this group is closed. Call World.init() to join again."
            )
        if self._world_rank not in self.ranks:
            raise WorldError(
                f"{call}: rank {self._world_rank} is not in the group {list(self.ranks)}. "
                "Ask group.contains(world.rank) first."
            )

    def index_of(self, rank: int, what: str) -> int:
        """The place of the world's rank ``rank`` in this group; refused when it has none."""
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise WorldError(f"{what}={rank!r} must be a rank: one of {list(self.ranks)}.")
        if rank not in self.ranks:
            raise WorldError(
                f"{what}={rank} is not a rank of the group: it must be one of {list(self.ranks)} "
                "(ranks are those of the whole world)."
            )
        return self.ranks.index(rank)

    def wire(self, device: torch.device) -> tuple[dist.ProcessGroup, torch.device]:
        """Which process group moves tensors of ``device``, and from which device it takes them.

        Only a backend made for a device (NCCL for CUDA) moves its memory directly. Everything
        else travels through host memory over Gloo.
        """
        assert self.process_group is not None
        assert self._cpu_group is not None
        if self._backends.get(device.type, "gloo") != "gloo":
            return self.process_group, device
        return self._cpu_group, torch.device("cpu")

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """The process group that moves CPU tensors."""
        assert self._cpu_group is not None
        return self._cpu_group

    @property
    def torch_groups(self) -> set[dist.ProcessGroup]:
        """The process groups behind it; none in a world of one and on ranks that are no members."""
        return {group for group in (self.process_group, self._cpu_group) if group is not None}

    @property
    def timeout(self) -> timedelta:
        """How long one collective may take before it raises."""
        return self._timeout

    @property
    def checks(self) -> bool:
        """Whether collectives compare their calls between ranks before data moves."""
        return self._checks

    def next_call(self) -> int:
        """Count one collective; equal on all members as long as they call the same ones."""
        self._calls += 1
        return self._calls

    def close(self) -> None:
        """Refuse further use."""
        self._closed = True


def backend_by_device(process_group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` for a process group (default: the default one)."""
    config: Any = dist.get_backend_config(process_group)
    pairs = (pair.partition(":") for pair in str(config).split(","))
    return {device: backend for device, _, backend in pairs}


def check_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """``ranks`` in ascending order; refused unless each is a rank of a world of ``size``."""
    try:
        members = tuple(ranks)
    except TypeError:
        raise WorldError(f"group({ranks!r}): give a list of ranks, such as [0, 1].") from None
    if not members:
        raise WorldError("group([]): a group needs at least one rank.")
    for rank in members:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
            raise WorldError(
                f"group({list(members)}): {rank!r} is not a rank of this world of {size}: "
                f"ranks are 0 to {size - 1}."
            )
    if len(set(members)) != len(members):
        raise WorldError(f"group({list(members)}): a rank is named more than once.")
    return tuple(sorted(members))


def rank_problem(members: Group, rank: int, what: str) -> WorldError | None:
    """Why ``rank`` is no member, as an error to raise; ``what`` names the argument."""
    try:
        members.index_of(rank, what)
    except WorldError as problem:
        return problem
    return None
