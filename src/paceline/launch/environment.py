"""The environment of a rank: the variables that a launcher sets, and how a process reads them.

``read_environment`` reads and checks them by the table in ``launchers.py``: torchrun's own
(``RANK``, ``WORLD_SIZE``, …), which we set as well, so that scripts run under either; those of
SLURM, Open MPI, MPICH and PMI; the index of a Kubernetes job. With none of them the process runs
alone. ``shared_variables`` and ``rank_variables`` are what our launcher sets.

No torch here, so that a command line starts quickly.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import WorldError
from paceline.launch.launchers import (
    BY_HAND,
    KUBERNETES,
    SLURM,
    Launcher,
    task_launchers,
    torch_launcher,
)
from paceline.launch.listening import is_loopback
from paceline.launch.logs import RankLogs
from paceline.launch.master_address import derived_address, derived_port
from paceline.launch.slurm_nodes import expand_counts
from paceline.launch.variable_reader import VariableReader, whole_number

FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
"""How many collectives torch remembers; it looks before the first process group is made."""
COLLECTIVES_REMEMBERED = 256
SECRET = "PACELINE_SECRET"
SECRET_FILE = "PACELINE_SECRET_FILE"
"""Who may take part in a run, see ``secret.py``: for launchers, never passed on to ranks."""
RUN_DIR = "PACELINE_RUN_DIR"
"""The run's folder, for scripts and what they use."""
LOG_FILE = "PACELINE_LOG_FILE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where a rank writes the error that ends it; the elastic agent's own name for it."""
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


@dataclass(frozen=True)
class Environment:
    """What a process knows of its world: its rank, its node, and the address of the store."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    address: str | None
    """``MASTER_ADDR``; ``None`` only for a single rank that was given no address."""
    port: int | None
    restart_count: int
    """How often this world was started again: by the elastic agent, or by SLURM's requeue."""
    store_is_hosted: bool
    """The launcher already serves the store at ``address:port``; no rank has to."""
    launcher: str = field(default="none", compare=False)
    """Who started this process, by its name in ``launchers.py``."""
    variables: tuple[str, ...] = field(default=(), compare=False)
    """By which variables that is known, and what was read from them."""
    node_is_known: bool = field(default=True, compare=False)
    """MPI has no number of the node: ranks that join find it out (``paceline.world.joining``)."""
    has_own_gpus: bool = field(default=False, compare=False)
    """The launcher shows each rank of a machine GPUs of its own (``srun --gpus-per-task``)."""
    run_id: str = ""
    """What this launch calls itself, the same through its restarts (``TORCHELASTIC_RUN_ID``)."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment | None:
    """What a launcher set for this process, or ``None`` when no launcher started it.

    A partial or contradictory set raises ``WorldError`` naming the variables.

    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` may be left out when they follow from the rest: by
    ``rank modulo LOCAL_WORLD_SIZE`` when only the size is given, and ``rank`` itself when the
    ranks share this machine (``MASTER_ADDR`` is localhost). Otherwise they must be set: guessing
    wrong would put several ranks on one GPU.
    """
    env = os.environ if environ is None else environ
    sources = _sources(env)
    if not sources:
        return None
    read = VariableReader(env, sources)
    read.require("rank", "size")
    size = read.number("size", minimum=1)
    rank = read.number("rank")
    read.check_below("rank", rank, "size", size)
    if read.task_launcher is not None:
        local_rank, local_size = _local_of_task(read, rank, size)
        address, port = _rendezvous_of_task(read, rank, size, local_size)
    else:
        address, port = _rendezvous(env, size)
        local_rank, local_size = _local(read, rank, size, address)
    node_is_known = read.name_of("node") is not None or local_size == size
    node = read.number("node", default=rank // local_size)
    nodes = read.number("nodes", minimum=1, default=max(-(-size // local_size), node + 1))
    read.check_below("node", node, "nodes", nodes)
    return Environment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=address,
        port=port,
        restart_count=read.number("restarts", default=0),
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and read.task_launcher is None,
        launcher=read.launcher.name,
        variables=tuple(read.used),
        node_is_known=node_is_known or read.task_launcher is None,
        has_own_gpus=read.task_launcher is SLURM
        and ("SLURM_GPUS_PER_TASK" in env or "gpu" in env.get("SLURM_TRES_PER_TASK", "")),
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
    )


def _sources(env: Mapping[str, str]) -> list[Launcher]:
    """Whose variables to read, those of the first that has one count; checked to agree."""
    by_torch, tasks = torch_launcher(env), task_launchers(env)
    if by_torch is not None and (by_torch is not BY_HAND or not tasks):
        return [by_torch]  # what they inherited from the launchers outside is no matter
    if not tasks:
        return []
    chosen = tasks[0]
    for other in tasks[1:]:
        _check_agreement(env, chosen, other)
    if by_torch is None:
        return [chosen]
    has_both = "RANK" in env and "WORLD_SIZE" in env
    if has_both and (chosen is KUBERNETES or _is_inside(env, chosen)):
        return [by_torch]
    _check_agreement(env, by_torch, chosen)
    return [by_torch, chosen]


def _is_inside(env: Mapping[str, str], outer: Launcher) -> bool:
    """Whether torch's variables are those of ranks that a task of ``outer`` started itself.

    As scripts with ``torch.multiprocessing.spawn`` do: every task starts equally many.
    """
    torchs, tasks = VariableReader(env, [BY_HAND]), VariableReader(env, [outer])
    tasks.require("rank", "size")
    size, outer_size = torchs.number("size", minimum=1), tasks.number("size", minimum=1)
    if size <= outer_size or size % outer_size:
        return False
    return torchs.number("rank") // (size // outer_size) == tasks.number("rank")


def _check_agreement(env: Mapping[str, str], one: Launcher, other: Launcher) -> None:
    """Refuse two launchers that say different things of this process's rank or the world's size."""
    first, second = VariableReader(env, [one]), VariableReader(env, [other])
    for value in ("size", "rank"):
        names = first.name_of(value), second.name_of(value)
        if names[0] is None or names[1] is None or other is KUBERNETES:
            continue
        if first.number(value) != second.number(value):
            raise WorldError(
                f"{names[0]}={env[names[0]]}, but {names[1]}={env[names[1]]} by {other.name}, "
                f"which started this process: they contradict each other. Unset {names[0]} (and "
                f"what was set with it), or start as many ranks as it says. {other.fix}"
            )


def _rendezvous(env: Mapping[str, str], size: int) -> tuple[str | None, int | None]:
    """The address and port of the store; a single rank without an address needs none."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if not missing:
        return env["MASTER_ADDR"], _port(env)
    if size == 1:
        return None, None
    raise WorldError(
        f"WORLD_SIZE={size} but {' and '.join(missing)} is not set: {size} ranks need the host "
        f"name and a free port of rank 0 to meet. {BY_HAND.fix}"
    )


def _rendezvous_of_task(
    read: VariableReader, rank: int, size: int, local_size: int
) -> tuple[str | None, int | None]:
    """The same under a launcher that does not set them: they are derived, see master_address.py."""
    env, launcher = read.env, read.launcher
    is_set = [bool(env.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if size == 1 and not all(is_set):
        return None, None
    read.used += [
        name for name, given in zip(("MASTER_ADDR", "MASTER_PORT"), is_set, strict=True) if given
    ]
    one_host = local_size == size
    address = env.get("MASTER_ADDR") or derived_address(env, launcher, rank=rank, one_host=one_host)
    return address, _port(env) if is_set[1] else derived_port(env, launcher, one_host=one_host)


def _port(env: Mapping[str, str]) -> int:
    port = whole_number(env, "MASTER_PORT", BY_HAND.fix, minimum=1)
    if port > 65535:
        raise WorldError(f"MASTER_PORT={port} is not a port: it must be from 1 to 65535.")
    return port


def _local(read: VariableReader, rank: int, size: int, address: str | None) -> tuple[int, int]:
    """Rank and number of ranks on this machine, by the rule in ``read_environment``."""
    one_machine = size == 1 or (address is not None and is_loopback(address))
    nodes = read.number("nodes", minimum=1, default=1)
    if read.name_of("local_size") is not None:
        local_size = read.number("local_size", minimum=1)
    elif nodes == size:
        local_size = 1
    elif one_machine:
        local_size = size
    else:
        raise WorldError(
            f"LOCAL_WORLD_SIZE is not set, and MASTER_ADDR={address} is another machine's address, "
            f"so how many of the {size} ranks run on this one is unknown. Set LOCAL_WORLD_SIZE "
            "(and LOCAL_RANK) on every rank; torchrun and paceline do."
        )
    return _checked_local(read, rank, size, local_size)


def _local_of_task(read: VariableReader, rank: int, size: int) -> tuple[int, int]:
    """The same under a launcher with variables of its own for it."""
    address = read.env.get("MASTER_ADDR")
    nodes = read.number("nodes", minimum=1, default=0)
    if read.name_of("local_size") is not None:
        local_size = read.number("local_size", minimum=1)
    elif (counted := _tasks_of_node(read, size)) is not None:
        local_size = counted
    elif read.launcher.starts_one_process or nodes == size:
        local_size = 1
    elif size == 1 or nodes == 1 or (address is not None and is_loopback(address)):
        local_size = size
    else:
        names = read.names("local_size")[-1:] if read.launcher.local_size else []
        raise WorldError(
            f"{read.launcher.name} started {size} ranks, but how many of them run on this machine "
            f"is unknown: {' and '.join([*names, 'LOCAL_WORLD_SIZE'])} is not set. "
            f"{read.launcher.fix}"
        )
    return _checked_local(read, rank, size, local_size)


def _tasks_of_node(read: VariableReader, size: int) -> int | None:
    """How many tasks SLURM started on this node, by its list for all of them."""
    name = next((name for name in _TASKS_PER_NODE if read.env.get(name)), None)
    if read.launcher is not SLURM or name is None or read.name_of("node") is None:
        return None
    counts, node = expand_counts(read.env[name]), read.number("node")
    if sum(counts) != size:
        raise WorldError(
            f"{name}={read.env[name]} is {sum(counts)} tasks, but {read.name_of('size')}={size}: "
            f"they contradict each other. {SLURM.fix}"
        )
    if node >= len(counts):
        raise WorldError(
            f"SLURM_NODEID={node}, but {name}={read.env[name]} is {len(counts)} nodes: they "
            f"contradict each other. {SLURM.fix}"
        )
    read.used.append(name)
    return counts[node]


def _checked_local(read: VariableReader, rank: int, size: int, local_size: int) -> tuple[int, int]:
    name = read.name_of("local_size") or "LOCAL_WORLD_SIZE"
    if local_size > size:
        raise WorldError(
            f"{name}={local_size} is more than {read.name_of('size')}={size}: one machine cannot "
            "hold more ranks than the world."
        )
    local_rank = read.number("local_rank", default=rank % local_size)
    read.check_below("local_rank", local_rank, "local_size", local_size)
    return local_rank, local_size


# Setting it.


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of one node in a world: ``local_size`` of them, from ``first`` on."""

    size: int
    first: int
    local_size: int
    node: int
    nodes: int
    """Those that have ranks; others are idle."""
    address: str
    port: int
    restart_count: int
    max_restarts: int
    run_id: str

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first, self.first + self.local_size)


def ranks_per_node(nprocs: Sequence[int], used: int) -> list[int]:
    """How many ranks of each node are below ``used``, where node ``k`` has ``nprocs[k]``."""
    if not 0 <= used <= sum(nprocs):
        raise ValueError(f"{used} ranks cannot be used of a world of {sum(nprocs)}.")
    bases = [sum(nprocs[:node]) for node in range(len(nprocs))]
    return [max(0, min(nproc, used - base)) for base, nproc in zip(bases, nprocs, strict=True)]


def inherited_variables() -> dict[str, str]:
    """What ranks inherit of the launcher's own environment: all but the secret of the run."""
    secret = (SECRET, SECRET_FILE)
    return {name: value for name, value in os.environ.items() if name not in secret}


def shared_variables(nproc: int) -> dict[str, str]:
    """What every one of the ``nproc`` ranks of this machine gets, whatever its rank."""
    env = {"PYTHONUNBUFFERED": "1"}
    if FLIGHT_RECORDER not in os.environ:  # here for scripts that make a process group themselves
        env[FLIGHT_RECORDER] = str(COLLECTIVES_REMEMBERED)
    if "OMP_NUM_THREADS" not in os.environ:
        # Each rank would take every core for itself, and all of them would get slower.
        env["OMP_NUM_THREADS"] = str(max(1, _usable_cores() // nproc))
    home = str(Path(__file__).parents[2])
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        # Found through a source folder on this process's path: ranks must find it too.
        env["PYTHONPATH"] = os.pathsep.join(
            part for part in (os.environ.get("PYTHONPATH", ""), home) if part
        )
    return env


def loopback_interfaces() -> dict[str, str]:
    """What has Gloo and NCCL listen on loopback alone: for ranks that are all on this machine.

    Left out is what the user has set. By itself Gloo takes the address of the host's name, and
    NCCL that of the first interface, where other machines reach them.
    """
    if sys.platform != "linux":
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def rank_variables(assignment: RankAssignment, rank: int, logs: RankLogs) -> dict[str, str]:
    """What a rank gets in addition: its coordinates, the store's address, its files."""
    return {
        **(loopback_interfaces() if assignment.nodes == 1 else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(assignment.size),
        "LOCAL_RANK": str(rank - assignment.first),
        "LOCAL_WORLD_SIZE": str(assignment.local_size),
        "GROUP_RANK": str(assignment.node),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(assignment.size),
        "ROLE_NAME": "rank",
        "MASTER_ADDR": assignment.address,
        "MASTER_PORT": str(assignment.port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(assignment.max_restarts),
        "TORCHELASTIC_RUN_ID": assignment.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # As torchrun does: a NCCL collective that fails ends its rank instead of leaving it stuck.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ERROR_FILE: str(logs.error_file(rank)),
        LOG_FILE: str(logs.log(rank).absolute()),
    }


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
