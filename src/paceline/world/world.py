"""The world: the processes of one run, and this one's place among them."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from paceline.diagnose.hangs.watch import Watch, chosen_after
from paceline.diagnose.pulse import Pulse
from paceline.errors import CollectiveMismatch, WorldError
from paceline.launch.environment import Environment, read_environment
from paceline.layout import Layout
from paceline.world import agreement, joining, seeding
from paceline.world.group import Group, backend_by_device
from paceline.world.mesh import group_of_one, make_mesh
from paceline.world.sealing import sealed

DEFAULT_TIMEOUT = 300.0
"""Seconds a rank waits for the others, to join and in each collective."""


class World:
    """The processes of one run. One process alone is a world too: nothing needs a launcher.

    Join with :meth:`World.init`, as a context manager or with :meth:`close` at the end. A process
    is in one world at a time; :meth:`World.current` finds it from anywhere.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    backend: str
    """``gloo`` or ``nccl``; ``none`` for a process that no launcher started."""
    restart_count: int
    """How often the launcher has restarted this world after a failure."""
    everyone: Group
    """The group of all ranks."""

    _joined: ClassVar[World | None] = None

    def __init__(
        self,
        place: Environment,
        *,
        device: torch.device,
        backend: str,
        timeout: timedelta,
        checks: bool,
        owns_group: bool,
        store: Store | None,
    ) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.node, self.nodes = place.node, place.nodes
        self.restart_count = place.restart_count
        self.device, self.backend = device, backend
        self.timeout, self.checks = timeout, checks
        self._address = None if place.address is None else f"{place.address}:{place.port}"
        self._owns_group = owns_group
        self._store = store
        self._pid = os.getpid()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._meshes: dict[Layout, DeviceMesh] = {}
        self._background: dict[tuple[str, tuple[int, ...] | None], dist.ProcessGroup] = {}
        self.pulse = Pulse()
        """Where this rank is: marked by engine and trainer, read by the watch for hangs."""
        self._watch: Watch | None = None
        self._before_close: list[Callable[[float], None]] = []
        self._closed = False
        self._barriers = 0
        self.everyone = self._make_group(tuple(range(self.size)))

    @classmethod
    def init(
        cls,
        *,
        backend: str = "auto",
        device: str | torch.device = "auto",
        timeout: float | None = None,
        checks: bool | None = None,
        hang_after: float | None = None,
    ) -> World:
        """Join the world the launcher describes (``RANK``, ``WORLD_SIZE``, …), or stand alone.

        ``backend`` is ``auto`` (NCCL on CUDA, Gloo on CPU), ``gloo`` or ``nccl``; ``device`` is
        ``auto`` (this rank's own GPU, else the CPU) or a device. ``timeout`` (seconds, default
        300) bounds the wait for other ranks, here and in every collective. ``checks=False``
        switches off the comparison of calls before each collective; it must be the same on all
        ranks. Ranks that have not moved for ``hang_after`` seconds (default 60, 0: never) are
        reported with what they wait for; see docs/guides/hangs.md.

        A process group that someone else initialised is used, and left alone on close. Joining
        again returns the world already joined; asking it for different settings is refused.
        """
        if cls._joined is not None:
            return cls._joined._require_same(backend, device, timeout, checks)
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise WorldError(f"timeout={timeout!r} must be a number of seconds above 0.")
        limit = timedelta(seconds=seconds)
        after = chosen_after(hang_after)
        place = read_environment()
        if dist.is_available() and dist.is_initialized():
            world = cls._adopt(place, backend, device, limit, checks is not False)
        else:
            if after:
                joining.record_collectives(place)
            world = cls._join(place, backend, device, limit, checks is not False)
        if after and place is not None:
            world._watch = joining.start_watch(place, world.pulse, after)
        cls._joined = world
        return world

    @classmethod
    def current(cls) -> World:
        """The world this process has joined; joins by :meth:`World.init` when there is none."""
        return cls._joined if cls._joined is not None else cls.init()

    @classmethod
    def _join(
        cls,
        place: Environment | None,
        backend: str,
        device: str | torch.device,
        timeout: timedelta,
        checks: bool,
    ) -> World:
        alone = place is None or place.address is None
        place = place or _ALONE
        chosen = joining.choose_device(device, backend, place)
        name = joining.choose_backend(backend, chosen)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        store = None if alone else joining.join(place, name, chosen, timeout, checks)
        return cls(
            place,
            device=chosen,
            backend="none" if alone else name,
            timeout=timeout,
            checks=checks,
            owns_group=not alone,
            store=store,
        )

    @classmethod
    def _adopt(
        cls,
        place: Environment | None,
        backend: str,
        device: str | torch.device,
        timeout: timedelta,
        checks: bool,
    ) -> World:
        """Use the default process group that someone else made."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if place is None or (place.rank, place.size) != (rank, size):
            # Made without a launcher's variables: on one machine, as far as anyone can tell.
            place = Environment(rank, size, rank, size, 0, 1, None, None, 0, False)
        backends = set(backend_by_device().values())
        name = "nccl" if "nccl" in backends else sorted(backends)[0]
        if backend not in ("auto", name):
            raise WorldError(
                f"backend={backend!r} but a process group with backend {name!r} is already "
                "initialised. Leave backend='auto' to use it, or destroy it first."
            )
        chosen = joining.choose_device(device, name, place)
        return cls(
            place,
            device=chosen,
            backend=name,
            timeout=timeout,
            # The fake backend moves nothing, so there is nothing to compare.
            checks=checks and name != "fake",
            owns_group=False,
            store=None,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that speaks and writes."""
        return self.rank == 0

    def group(self, ranks: Iterable[int]) -> Group:
        """A group of some ranks. **Every** rank of the world must call this, members or not.

        Asking twice for the same ranks gives the same group.
        """
        members = self._checked_ranks(ranks)
        self._require_open("group")
        if members not in self._groups:
            agreement.meet(self.everyone, f"world.group({list(members)})", checks=self.checks)
            self._make_group(members)
        return self._groups[members]

    def seed(self, seed: int) -> None:
        """Give this rank its own random streams (torch, random, numpy), derived from ``seed``."""
        seeding.seed_everything(seed, self.rank)

    def info(self) -> dict[str, Any]:
        """Everything there is to know about this process's place, as plain values."""
        facts: dict[str, Any] = {
            "rank": self.rank,
            "size": self.size,
            "local_rank": self.local_rank,
            "local_size": self.local_size,
            "node": self.node,
            "nodes": self.nodes,
            "device": str(self.device),
            "backend": self.backend,
            "address": self._address,
            "timeout": self.timeout.total_seconds(),
            "checks": self.checks,
            "restart_count": self.restart_count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        if self.device.type == "cuda":
            facts["gpu"] = torch.cuda.get_device_name(self.device)
            facts["cuda"] = torch.version.cuda
        return facts

    def mesh(self, layout: Layout) -> DeviceMesh:
        """The ranks as a grid, one axis for each way ``layout`` spreads a model. A collective.

        Axes: ``pp``, ``copies`` and ``shards`` (together the data-parallel ranks), ``cp``, ``tp``.
        """
        self._require_open("mesh()")
        layout.check_world(self.size)
        if layout not in self._meshes:
            if self.backend == "none" and not dist.is_initialized():
                group_of_one(self.device)
                self._owns_group = True
            self._meshes[layout] = make_mesh(layout, self.device)
        return self._meshes[layout]

    def background_group(
        self, name: str, ranks: Iterable[int] | None = None
    ) -> dist.ProcessGroup | None:
        """A Gloo group for a thread of its own; ``None`` in a world of one.

        Of all ranks, or of ``ranks``. Collectives of two threads on one group would mix. **Every**
        rank must ask for it; asking twice for the same ``name`` gives the same group.
        """
        self._require_open("background_group()")
        if self.backend == "none":
            return None
        members = None if ranks is None else self._checked_ranks(ranks)
        key = (name, members)
        if key not in self._background:
            everyone = None if members is None else list(members)
            with sealed():
                self._background[key] = dist.new_group(
                    everyone, backend="gloo", timeout=self.timeout
                )
        return self._background[key]

    def before_close(self, action: Callable[[float], None]) -> None:
        """Have ``action`` done when this world is left, while there are connections.

        It is to wait for what it has under way with other ranks, at most for the seconds it is
        given: few where this rank leaves because of an error.
        """
        self._before_close.append(action)

    def close(self, *, failed: bool = False) -> None:
        """Leave the world: destroys the process group if this world made it. May be called twice.

        The other ranks are not waited for; a collective they are still in fails. ``failed``: there
        is no time for what is under way, either.
        """
        if self._closed:
            return
        if self._pid == os.getpid():
            patience = _FAILED_PATIENCE if failed else self.timeout.total_seconds()
            for action in self._before_close:
                with contextlib.suppress(Exception):  # this rank leaves, whatever came of it
                    action(patience)
        self._closed = True
        if World._joined is self:
            World._joined = None
        if self._watch is not None:
            self._watch.stop()
        for group in self._groups.values():
            group.close()
        # A forked child holds a copy of this object, not of the connections.
        if self._pid != os.getpid() or not (dist.is_available() and dist.is_initialized()):
            return
        if self._owns_group:
            dist.destroy_process_group()
        else:
            self._destroy_own_groups()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, size={self.size}, device={self.device}, "
            f"backend={self.backend!r})"
        )

    def wait_at_barrier(
        self, group: Group, timeout: timedelta | None, problem: WorldError | None
    ) -> None:
        """What :func:`collectives.barrier` does: meets, and knows who is missing if it cannot."""
        name = "barrier" if group is self.everyone else f"barrier of {list(group.ranks)}"
        if self._store is None or group.size == 1:
            agreement.meet(group, name, checks=True, problem=problem, timeout=timeout)
            return
        self._barriers += 1
        keys = [f"{name}/{self._barriers}/{rank}" for rank in group.ranks]
        with agreement.explained(group, name):
            self._store.set(keys[group.rank], "here")
        try:
            if timeout is not None and timeout > group.timeout:
                # Longer than any collective may take: wait at the store, which has the patience.
                with agreement.explained(group, name, timeout):
                    self._store.wait(keys, timeout)
            agreement.meet(group, name, checks=True, problem=problem, timeout=timeout)
        except CollectiveMismatch:
            raise
        except WorldError as error:
            missing = self._missing(group, keys)
            if missing:
                raise WorldError(f"{error} Ranks that did not come: {missing}.") from error
            raise
        self._store.delete_key(keys[group.rank])

    def _missing(self, group: Group, keys: list[str]) -> list[int]:
        assert self._store is not None
        try:
            return [
                rank
                for rank, key in zip(group.ranks, keys, strict=True)
                if not self._store.check([key])
            ]
        except RuntimeError:  # rank 0, which may serve the store, is gone as well
            return []

    def _make_group(self, members: tuple[int, ...]) -> Group:
        process_group, cpu_group = self._process_groups(members)
        group = Group(
            members,
            world_rank=self.rank,
            process_group=process_group,
            cpu_group=cpu_group,
            timeout=self.timeout,
            checks=self.checks,
        )
        self._groups[members] = group
        return group

    def _process_groups(
        self, members: tuple[int, ...]
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Torch's group for ``members``, and the one that carries their CPU tensors."""
        if self.backend == "none":
            return None, None
        if len(members) == self.size:
            group = dist.group.WORLD
        else:
            with sealed(dist.get_backend()):
                group = dist.new_group(list(members), timeout=self.timeout)
        if "cpu" in backend_by_device():
            cpu_group = group
        else:  # an adopted NCCL-only group: checks, objects and CPU tensors need Gloo beside it
            with sealed():
                cpu_group = dist.new_group(list(members), timeout=self.timeout, backend="gloo")
        if self.rank not in members:
            return None, None
        return group, cpu_group

    def _destroy_own_groups(self) -> None:
        for background in self._background.values():
            dist.destroy_process_group(background)
        for group in self._groups.values():
            for own in {group.process_group, group._cpu_group} - {None, dist.group.WORLD}:
                dist.destroy_process_group(own)

    def _checked_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        try:
            members = tuple(ranks)
        except TypeError:
            raise WorldError(f"group({ranks!r}): give a list of ranks, such as [0, 1].") from None
        if not members:
            raise WorldError("group([]): a group needs at least one rank.")
        for rank in members:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
                raise WorldError(
                    f"group({list(members)}): {rank!r} is not a rank of this world of {self.size}: "
                    f"ranks are 0 to {self.size - 1}."
                )
        if len(set(members)) != len(members):
            raise WorldError(f"group({list(members)}): a rank is named more than once.")
        return tuple(sorted(members))

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise WorldError(f"{call}: this world is closed. Call World.init() to join again.")

    def _require_same(
        self,
        backend: str,
        device: str | torch.device,
        timeout: float | None,
        checks: bool | None,
    ) -> World:
        """This world, unless what is asked differs from how it was joined."""
        wanted = {
            "backend": None if backend == "auto" or self.backend == "none" else backend,
            "device": None if device == "auto" else str(device),
            "timeout": timeout,
            "checks": checks,
        }
        have = {
            "backend": self.backend,
            "device": str(self.device),
            "timeout": self.timeout.total_seconds(),
            "checks": self.checks,
        }
        if wanted["device"] == self.device.type:
            wanted["device"] = None
        for name, value in wanted.items():
            if value is not None and value != have[name]:
                raise WorldError(
                    f"World.init({name}={value!r}): this process has already joined a world with "
                    f"{name}={have[name]!r}. Close it first, or leave {name} out."
                )
        return self


def resolve_group(group: Group | None, call: str) -> Group:
    """The group a collective runs on: everyone by default; refused where this rank is no member."""
    if group is None:
        group = World.current().everyone
    elif not isinstance(group, Group):
        raise WorldError(
            f"{call}: group must be made by world.group([...]), not a {type(group).__name__}."
        )
    group.require_member(call)
    return group


_FAILED_PATIENCE = 2.0
"""Seconds that a rank which leaves because of an error gives what it has under way."""
_ALONE = Environment(0, 1, 0, 1, 0, 1, None, None, 0, False)


def leave(*, failed: bool = False) -> None:
    """Close the world this process has joined, if it has."""
    if World._joined is not None:
        World._joined.close(failed=failed)


@atexit.register
def _leave_at_exit() -> None:
    """A process that ends without close leaves quietly, and its peers learn of it at once."""
    leave(failed=getattr(sys, "last_value", None) is not None)
