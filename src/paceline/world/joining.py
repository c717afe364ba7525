"""How a process joins its world: which device, which backend, and how it finds the other ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.diagnose.hangs import flight_recorder
from paceline.diagnose.hangs.watch import Watch, WatchedRank
from paceline.diagnose.pulse import Pulse
from paceline.errors import WorldError
from paceline.formatting import one_of
from paceline.launch.environment import Environment, loopback_interfaces
from paceline.launch.listening import is_loopback, listen
from paceline.world.objects import agree_on_key
from paceline.world.sealing import sealed

BACKENDS = ("auto", "gloo", "nccl")

# One store per address, kept for the life of the process: rank 0 may serve it, and a world
# that is closed and joined again must not find its peers still talking to a dead server.
_stores: dict[tuple[str, int, int], Store] = {}
_worlds_joined: dict[tuple[str, int, int], int] = {}
_lent: set[tuple[str, int, int]] = set()


def choose_device(
    device: str | torch.device, backend: str, env: Environment, *, share_gpu: bool = False
) -> torch.device:
    """The device of this rank; ``auto`` is its own GPU where there is one, else the CPU."""
    if device == "auto":
        if backend != "gloo" and torch.cuda.is_available():
            return _own_gpu(env, share_gpu)
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise WorldError(
            f"device={device!r} is not a device: use 'auto', 'cpu', 'cuda' or 'cuda:0'."
        ) from error
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise WorldError(
            f"device={str(device)!r} but torch finds no CUDA device here. Use device='cpu', or "
            "install a CUDA build of torch on a machine with a GPU."
        )
    if chosen.index is None:
        return _own_gpu(env, share_gpu)
    if chosen.index >= torch.cuda.device_count():
        raise WorldError(
            f"device={str(device)!r} but this machine has {torch.cuda.device_count()} GPUs: the "
            f"last one is cuda:{torch.cuda.device_count() - 1}."
        )
    return chosen


def _own_gpu(env: Environment, share_gpu: bool) -> torch.device:
    gpus = torch.cuda.device_count()
    if env.local_size > gpus and not (share_gpu or env.has_own_gpus):
        raise WorldError(
            f"{env.local_size} ranks on this machine but only {gpus} GPU(s): each rank needs "
            f"its own. Start {gpus} ranks or fewer, use device='cpu', or, for a test, let ranks "
            "share GPUs with World.init(share_gpu=True)."
        )
    return torch.device("cuda", env.local_rank % gpus)


def check_sharing(env: Environment, backend: str, device: torch.device) -> None:
    """Refuse ``share_gpu=True`` where there is nothing to share, or nobody to share it with."""
    if device.type != "cuda":
        raise WorldError(
            f"share_gpu=True lets ranks share GPUs, but this rank's device is {device} (CUDA "
            f"available: {torch.cuda.is_available()}). Leave share_gpu out, or run where torch "
            "finds a GPU."
        )
    if backend != "nccl":
        raise WorldError(
            f"share_gpu=True is for NCCL, but backend={backend!r}. Leave share_gpu out: over Gloo "
            "ranks may share a GPU as it is, with device='cuda:0'."
        )
    if env.nodes > 1:
        raise WorldError(
            f"share_gpu=True is for tests on one machine, but this world has {env.nodes}. Leave "
            "it out, and start as many ranks on each machine as it has GPUs."
        )


def share_gpus() -> None:
    """Let NCCL take this process for a host of its own, or it refuses two ranks on one GPU.

    What they send each other then goes through sockets: slow, with NCCL's own streams, order and
    errors. By process, not by rank: NCCL reads the name once in the life of a process, and live
    ranks of a pool change their rank from job to job.
    """
    os.environ["NCCL_HOSTID"] = f"paceline-{os.getpid()}"
    os.environ["NCCL_IB_DISABLE"] = "1"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def choose_backend(backend: str, device: torch.device) -> str:
    """``nccl`` for CUDA and ``gloo`` for the rest, unless asked otherwise."""
    if backend not in BACKENDS:
        raise WorldError(f"backend={backend!r} must be {one_of(BACKENDS)}.")
    if backend == "auto":
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        if device.type != "cuda":
            raise WorldError(
                f"backend='nccl' needs a CUDA device but this rank's device is {device} "
                f"(CUDA available: {torch.cuda.is_available()}). Use backend='gloo' or 'auto'."
            )
        if not dist.is_nccl_available():
            raise WorldError("backend='nccl' but this build of torch has no NCCL. Use 'gloo'.")
    return backend


def join(
    env: Environment, backend: str, device: torch.device, timeout: timedelta, checks: bool
) -> tuple[Store, Environment]:
    """Wait for the other ranks and make the default process group; returns the world's store.

    And what is known of the world by then: the node too, where no variable says it.
    """
    base = connect_store(env, timeout)
    key = _store_key(env)
    count = _worlds_joined[key] = _worlds_joined.get(key, 0) + 1
    # Each world of this process has its own part of the store: nothing is left over from the last.
    store = PrefixStore(f"paceline/{env.restart_count}/{count}", base)
    _claim_rank(store, env)
    agree_on_key(store)
    _wait_for_everyone(store, env, {"backend": backend, "checks": checks}, timeout)
    if not env.node_is_known:
        env = _with_node(store, env, timeout)
    # A CUDA world also gets Gloo, so that CPU tensors can be reduced without touching the GPU.
    torch_backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    if env.local_size == env.size:  # torchrun, say, does not see to it
        os.environ.update(loopback_interfaces())
    try:
        with sealed(torch_backend):
            dist.init_process_group(
                torch_backend,
                store=store,
                rank=env.rank,
                world_size=env.size,
                timeout=timeout,
            )
        if backend == "nccl":
            _connect_gpus(device)
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {env.rank} of {env.size} met the others at {env.address}:{env.port} "
            f"but {torch_backend} could not connect them: {_first_line(error)}"
        ) from error
    # A rank that left now would break those that are still connecting: nobody is in before all are.
    store.set(f"connected/{env.rank}", "yes")
    try:
        store.wait([f"connected/{rank}" for rank in range(env.size)], timeout)
    except RuntimeError as error:
        dist.destroy_process_group()
        raise WorldError(
            f"rank {env.rank} of {env.size} is connected at {env.address}:{env.port}, but "
            f"not all others are after {timeout.total_seconds():g} s: look for their errors."
        ) from error
    return store, env


def _with_node(store: Store, env: Environment, timeout: timedelta) -> Environment:
    """``env`` with the number of this rank's node, found by comparing with all other ranks."""
    keys = [f"node/{rank}" for rank in range(env.size)]
    store.set(keys[env.rank], json.dumps([env.local_rank, env.local_size, socket.gethostname()]))
    store.wait(keys, timeout)
    places = [RankPlace(*json.loads(value)) for value in store.multi_get(keys)]
    nodes = nodes_of(places)
    return dataclasses.replace(env, node=nodes[env.rank], nodes=max(nodes) + 1, node_is_known=True)


class RankPlace(NamedTuple):
    """What a rank knows of the machine it is on, where its launcher does not number those."""

    local_rank: int
    local_size: int
    host: str


def nodes_of(places: Sequence[RankPlace]) -> list[int]:
    """The number of each rank's node, in the order of their first ranks.

    Ranks that follow each other on a machine (0, 1, 0, 1) say where the next one begins. Others, as
    ``mpirun --map-by node`` places them, are told apart by the names of their hosts.
    """
    nodes: list[int] = []
    for rank, place in enumerate(places):
        starts_node = place.local_rank == 0
        if not starts_node and (rank == 0 or place.local_rank != places[rank - 1].local_rank + 1):
            break
        nodes.append((nodes[-1] if nodes else -1) + starts_node)
    sizes = Counter(nodes)
    if len(nodes) == len(places) and all(
        sizes[node] == place.local_size for node, place in zip(nodes, places, strict=True)
    ):
        return nodes
    hosts = list(dict.fromkeys(place.host for place in places))
    counts = Counter(place.host for place in places)
    wrong = [place for place in places if counts[place.host] != place.local_size]
    if wrong:
        raise WorldError(
            f"which ranks share a machine is unclear: {counts[wrong[0].host]} of {len(places)} "
            f"ranks run on a host called {wrong[0].host}, but its launcher started "
            f"{wrong[0].local_size} there. Give the hosts different names, or place ranks in order "
            "(mpirun --map-by slot)."
        )
    return [hosts.index(place.host) for place in places]


def _connect_gpus(device: torch.device) -> None:
    """Make NCCL's communicator now, so that what keeps GPUs apart is found while ranks join.

    ``device_id`` of ``init_process_group`` would do the same, but then meshes split that
    communicator, and a split now and then ends the process (seen with torch 2.11, NCCL 2.28).
    """
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)


def record_collectives(env: Environment | None) -> None:
    """Have torch record the collectives of the world to come, where there will be a watch."""
    if _can_be_watched(env):
        flight_recorder.switch_on()


def start_watch(env: Environment, pulse: Pulse, after: float) -> Watch | None:
    """Watch this rank for hangs; ``None`` where the ranks have no store in common."""
    if not _can_be_watched(env):
        return None
    address, port, restarts = _store_key(env)
    world = (restarts, _worlds_joined.get((address, port, restarts), 0))
    watch = Watch(WatchedRank(env.rank, env.size, address, port, world), pulse, after)
    watch.start()
    return watch


def _can_be_watched(env: Environment | None) -> bool:
    return env is not None and env.address is not None and _store_key(env) not in _lent


def lend_store(env: Environment, store: Store) -> None:
    """Join the world of ``env`` through ``store`` instead of a new connection to its address."""
    _stores[_store_key(env)] = store
    _lent.add(_store_key(env))


def forget_stores() -> None:
    """Drop the connections to every store; for processes that live through many worlds."""
    _stores.clear()
    _worlds_joined.clear()
    _lent.clear()


def _store_key(env: Environment) -> tuple[str, int, int]:
    assert env.address is not None
    assert env.port is not None
    return env.address, env.port, env.restart_count


def connect_store(env: Environment, timeout: timedelta) -> Store:
    """The store at the address in ``env``, which rank 0 serves where no launcher does.

    One connection in the life of a process, whoever asks.
    """
    key = _store_key(env)
    if key in _stores:
        return _stores[key]
    address, port, _ = key
    serves = env.rank == 0 and not env.store_is_hosted
    try:
        listener = listen(address, port) if serves and is_loopback(address) else None
        store = TCPStore(
            address,
            port,
            env.size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=listener is None,
            # Torch would listen at every address of the machine.
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (OSError, RuntimeError, ValueError) as error:
        action = "open" if serves else "reach"
        hint = (
            "Is the port taken by another run (set MASTER_PORT to a free one on all ranks), or the "
            "address not this machine's?"
            if serves
            else "Is rank 0 running, and MASTER_ADDR/MASTER_PORT the same on every rank?"
        )
        raise WorldError(
            f"rank {env.rank} of {env.size} could not {action} the store at "
            f"{address}:{port} (MASTER_ADDR:MASTER_PORT) within {timeout.total_seconds():g} s. "
            f"{hint} ({_first_line(error)})"
        ) from error
    _stores[key] = store
    return store


def _claim_rank(store: Store, env: Environment) -> None:
    """Two processes with one rank would hang all of them: the second is refused."""
    if store.add(f"claimed/{env.rank}", 1) > 1:
        raise WorldError(
            f"RANK={env.rank} has already joined at {env.address}:{env.port}: another "
            "process has the same RANK, or this one is a child (a data loader worker, say) that "
            "inherited it. Give each process its own RANK; children must not join."
        )


def _wait_for_everyone(
    store: Store, env: Environment, settings: dict[str, Any], timeout: timedelta
) -> None:
    """Every rank reports its settings, so that one that is missing or differs is named."""
    keys = [f"joined/{rank}" for rank in range(env.size)]
    store.set(keys[env.rank], json.dumps({"size": env.size, **settings}))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise WorldError(
            f"rank {env.rank} waited {timeout.total_seconds():g} s at "
            f"{env.address}:{env.port} for {env.size} ranks; missing: {missing}. Did they "
            "start, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        ) from error
    said = [json.loads(value) for value in store.multi_get(keys)]
    for name in said[0]:
        values = [other[name] for other in said]
        if len(set(values)) > 1:
            raise WorldError(
                f"ranks joined {env.address}:{env.port} with different {name}: "
                + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                + ". Every rank must join with the same settings."
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
