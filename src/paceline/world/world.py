"""The world: the processes of one run, and this one's rank among them."""

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
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from paceline.diagnose.hangs.watch import Watch, chosen_after
from paceline.diagnose.pulse import Pulse
from paceline.errors import WorldError
from paceline.launch.allocation import check_not_left_alone
from paceline.launch.environment import Environment, read_environment
from paceline.layout import Layout
from paceline.options.habits.attributes import missing_attribute
from paceline.torch_internals import abort_process_groups, default_store
from paceline.world.agreement import agree_on_call
from paceline.world.barrier import Barrier
from paceline.world.group import Group, backend_by_device, check_ranks
from paceline.world.joining import (
    check_sharing,
    choose_backend,
    choose_device,
    join,
    record_collectives,
    share_gpus,
    start_watch,
)
from paceline.world.mesh import group_of_one, make_mesh
from paceline.world.objects import agree_on_key
from paceline.world.process_groups import ProcessGroups
from paceline.world.seeding import seed_everything

DEFAULT_TIMEOUT = 300.0
"""Seconds a rank waits for the others, to join and in each collective."""


class World:
    """The processes of one run. One process alone is a world too: nothing needs a launcher.

    Join with ``World.init``, as a context manager or with ``close`` at the end. A process
    is in one world at a time; ``World.current`` finds it from anywhere.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    shares_gpu: bool
    """Whether ranks of this world may share a GPU; for tests."""
    backend: str
    """``gloo`` or ``nccl``; ``none`` for a process that no launcher started."""
    restart_count: int
    """How often the launcher has restarted this world after a failure."""
    launch_id: str
    """What the launch calls itself, the same through its restarts; empty where none is known."""
    everyone: Group
    """The group of all ranks."""

    _joined: ClassVar[World | None] = None

    def __init__(
        self,
        env: Environment,
        *,
        device: torch.device,
        backend: str,
        timeout: timedelta,
        checks: bool,
        owns_group: bool,
        store: Store | None,
        shares_gpu: bool = False,
    ) -> None:
        self.rank, self.size = env.rank, env.size
        self.local_rank, self.local_size = env.local_rank, env.local_size
        self.node, self.nodes = env.node, env.nodes
        self.restart_count, self.launch_id = env.restart_count, env.run_id
        self.device, self.backend, self.shares_gpu = device, backend, shares_gpu
        self.timeout, self.checks = timeout, checks
        self._launcher, self._launcher_variables = env.launcher, env.variables
        self._address = None if env.address is None else f"{env.address}:{env.port}"
        self._owns_group = owns_group
        self._barrier = Barrier(store)
        self._pid = os.getpid()
        self._groups = ProcessGroups(
            self.rank, self.size, timeout=timeout, checks=checks, alone=backend == "none"
        )
        self._meshes: dict[Layout, DeviceMesh] = {}
        self.pulse = Pulse()
        """Where this rank is: marked by engine and trainer, read by the watch for hangs."""
        self._watch: Watch | None = None
        self._before_close: list[Callable[[float], None]] = []
        self._closed = False
        self.everyone = self._groups.make(tuple(range(self.size)))

    @classmethod
    def init(
        cls,
        *,
        backend: str = "auto",
        device: str | torch.device = "auto",
        timeout: float | None = None,
        checks: bool | None = None,
        hang_after: float | None = None,
        share_gpu: bool = False,
    ) -> World:
        """Join the world the launcher describes, or run alone where there is none.

        Launchers are torchrun and ``paceline train``, SLURM's ``srun``, ``mpirun``, Ray Train and
        Kubernetes' indexed jobs; see docs/guides/launch.md for what is read of each.

        ``backend`` is ``auto`` (NCCL on CUDA, Gloo on CPU), ``gloo`` or ``nccl``; ``device`` is
        ``auto`` (this rank's own GPU, else the CPU) or a device. ``timeout`` (seconds, default
        300) bounds the wait for other ranks, here and in every collective. ``checks=False``
        switches off the comparison of calls before each collective; it must be the same on all
        ranks. Ranks that have not moved for ``hang_after`` seconds (default 60, 0: never) are
        reported with what they wait for; see docs/guides/hangs.md. ``share_gpu=True`` is for
        tests: more ranks than this machine has GPUs share them over real NCCL, slowly; see
        docs/guides/testing.md.

        A process group that someone else initialised is used, and left alone on close. Joining
        again returns the world already joined; asking it for different settings is refused.
        """
        if cls._joined is not None:
            return cls._joined._require_same(backend, device, timeout, checks, share_gpu)
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise WorldError(f"timeout={timeout!r} must be a number of seconds above 0.")
        limit = timedelta(seconds=seconds)
        after = chosen_after(hang_after)
        env = read_environment()
        if dist.is_available() and dist.is_initialized():
            if share_gpu:
                raise WorldError(
                    "share_gpu=True, but a process group is already initialised, and NCCL has "
                    "made up its mind about this host. Call World.init before "
                    "torch.distributed.init_process_group, or leave share_gpu out."
                )
            world = cls._adopt(env, backend, device, limit, checks is not False)
        else:
            if env is None:
                check_not_left_alone()
            if after:
                record_collectives(env)
            world = cls._join(env, backend, device, limit, checks is not False, share_gpu)
        if after and env is not None:
            world._watch = start_watch(env, world.pulse, after)
        cls._joined = world
        return world

    @classmethod
    def current(cls) -> World:
        """The world this process has joined; joins by ``World.init`` when there is none."""
        return cls._joined if cls._joined is not None else cls.init()

    @classmethod
    def joined(cls) -> World | None:
        """The world this process has joined; ``None`` where it has not. Joins none."""
        return cls._joined

    @classmethod
    def _join(
        cls,
        env: Environment | None,
        backend: str,
        device: str | torch.device,
        timeout: timedelta,
        checks: bool,
        share_gpu: bool,
    ) -> World:
        alone = env is None or env.address is None
        env = env or _ALONE
        chosen = choose_device(device, backend, env, share_gpu=share_gpu)
        name = choose_backend(backend, chosen)
        if share_gpu:
            check_sharing(env, name, chosen)
            share_gpus()
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        store = None
        if not alone:
            store, env = join(env, name, chosen, timeout, checks)
        return cls(
            env,
            device=chosen,
            backend="none" if alone else name,
            timeout=timeout,
            checks=checks,
            owns_group=not alone,
            store=store,
            shares_gpu=share_gpu,
        )

    @classmethod
    def _adopt(
        cls,
        env: Environment | None,
        backend: str,
        device: str | torch.device,
        timeout: timedelta,
        checks: bool,
    ) -> World:
        """Use the default process group that someone else made."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if env is None or (env.rank, env.size) != (rank, size):
            # Made without a launcher's variables: on one machine, as far as is known.
            env = Environment(
                rank, size, rank, size, 0, 1, None, None, 0, False, "the program itself"
            )
        backends = set(backend_by_device().values())
        name = "nccl" if "nccl" in backends else sorted(backends)[0]
        if backend not in ("auto", name):
            raise WorldError(
                f"backend={backend!r} but a process group with backend {name!r} is already "
                "initialised. Leave backend='auto' to use it, or destroy it first."
            )
        chosen = choose_device(device, name, env)
        if size > 1 and name != "fake":
            agree_on_key(default_store())
        return cls(
            env,
            device=chosen,
            backend=name,
            timeout=timeout,
            # The fake backend moves nothing, so there is nothing to compare.
            checks=checks and name != "fake",
            owns_group=False,
            store=None,
        )

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, "World", name)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def group(self, ranks: Iterable[int]) -> Group:
        """A group of some ranks. **Every** rank of the world must call this, members or not.

        Asking twice for the same ranks gives the same group.
        """
        members = check_ranks(ranks, self.size)
        self._require_open("group")
        if members not in self._groups:
            agree_on_call(self.everyone, f"world.group({list(members)})", checks=self.checks)
            self._groups.make(members)
        return self._groups[members]

    def seed(self, seed: int) -> None:
        """Give this rank its own random streams (torch, random, numpy), derived from ``seed``."""
        seed_everything(seed, self.rank)

    def info(self) -> dict[str, Any]:
        """Everything there is to know about this process and its world, as plain values."""
        facts: dict[str, Any] = {
            "rank": self.rank,
            "size": self.size,
            "local_rank": self.local_rank,
            "local_size": self.local_size,
            "node": self.node,
            "nodes": self.nodes,
            "device": str(self.device),
            "backend": self.backend,
            "launcher": self._launcher,
            "launcher_variables": list(self._launcher_variables),
            "address": self._address,
            "timeout": self.timeout.total_seconds(),
            "checks": self.checks,
            "shares_gpu": self.shares_gpu,
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
        members = None if ranks is None else check_ranks(ranks, self.size)
        return self._groups.background(name, members)

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
        self._groups.close()
        # A forked child holds a copy of this object, not of the connections.
        if self._pid != os.getpid() or not (dist.is_available() and dist.is_initialized()):
            return
        if self._owns_group and failed and self.backend == "nccl":
            # NCCL would wait for what is under way, and the others may be waiting for this rank.
            abort_process_groups()
        elif self._owns_group:
            dist.destroy_process_group()
        else:
            self._groups.destroy()

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
        """What ``collectives.barrier`` does, with the store to name the ranks that miss."""
        name = "barrier" if group is self.everyone else f"barrier of {list(group.ranks)}"
        self._barrier.wait(group, name, timeout, problem)

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise WorldError(f"{call}: this world is closed. Call World.init() to join again.")

    def _require_same(
        self,
        backend: str,
        device: str | torch.device,
        timeout: float | None,
        checks: bool | None,
        share_gpu: bool,
    ) -> World:
        """This world, unless what is asked differs from how it was joined."""
        wanted = {
            "backend": None if backend == "auto" or self.backend == "none" else backend,
            "device": None if device == "auto" else str(device),
            "timeout": timeout,
            "checks": checks,
            "share_gpu": share_gpu or None,
        }
        have = {
            "backend": self.backend,
            "device": str(self.device),
            "timeout": self.timeout.total_seconds(),
            "checks": self.checks,
            "share_gpu": self.shares_gpu,
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
