"""Torch's process groups behind the groups of a world: made once each, destroyed together."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from paceline.world.group import Group, backend_by_device
from paceline.world.sealing import sealed


class ProcessGroups:
    """The groups of a world by their ranks. ``alone``: a world of one process, without any."""

    def __init__(
        self, rank: int, size: int, *, timeout: timedelta, checks: bool, alone: bool
    ) -> None:
        self._rank, self._size = rank, size
        self._timeout, self._checks, self._alone = timeout, checks, alone
        self._groups: dict[tuple[int, ...], Group] = {}
        self._background: dict[tuple[str, tuple[int, ...] | None], dist.ProcessGroup] = {}

    def __contains__(self, members: tuple[int, ...]) -> bool:
        return members in self._groups

    def __getitem__(self, members: tuple[int, ...]) -> Group:
        return self._groups[members]

    def make(self, members: tuple[int, ...]) -> Group:
        """Make the group of ``members``. **Every** rank of the world must call this."""
        process_group, cpu_group = self._torch_groups(members)
        group = Group(
            members,
            world_rank=self._rank,
            process_group=process_group,
            cpu_group=cpu_group,
            timeout=self._timeout,
            checks=self._checks,
        )
        self._groups[members] = group
        return group

    def background(self, name: str, members: tuple[int, ...] | None) -> dist.ProcessGroup:
        """The Gloo group called ``name`` for a thread of its own, of all ranks or ``members``."""
        key = (name, members)
        if key not in self._background:
            ranks = None if members is None else list(members)
            with sealed():
                self._background[key] = dist.new_group(ranks, backend="gloo", timeout=self._timeout)
        return self._background[key]

    def close(self) -> None:
        """Refuse further use of every group."""
        for group in self._groups.values():
            group.close()

    def destroy(self) -> None:
        """Destroy what was made here, and leave the default process group alone."""
        for background in self._background.values():
            dist.destroy_process_group(background)
        for group in self._groups.values():
            for own in group.torch_groups - {dist.group.WORLD}:
                dist.destroy_process_group(own)

    def _torch_groups(
        self, members: tuple[int, ...]
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Torch's group for ``members``, and the one that carries their CPU tensors."""
        if self._alone:
            return None, None
        if len(members) == self._size:
            group = dist.group.WORLD
        else:
            with sealed(dist.get_backend()):
                group = dist.new_group(list(members), timeout=self._timeout)
        if "cpu" in backend_by_device():
            cpu_group = group
        else:  # an adopted NCCL-only group: checks, objects and CPU tensors need Gloo beside it
            with sealed():
                cpu_group = dist.new_group(list(members), timeout=self._timeout, backend="gloo")
        if self._rank not in members:
            return None, None
        return group, cpu_group
