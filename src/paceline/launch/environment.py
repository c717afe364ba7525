"""The environment of a rank: the variables that a launcher sets, and how a process reads them.

They are torchrun's, so that scripts run under either. ``read_environment`` reads and checks
them: ``RANK`` and ``WORLD_SIZE`` decide; with neither (and no ``LOCAL_RANK``) the process runs
alone. ``shared_variables`` and ``rank_variables`` are what our launcher sets.

No torch here, so that a command line starts quickly.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import WorldError
from paceline.launch.listening import is_loopback
from paceline.launch.logs import RankLogs

# Any of these says that a launcher started this process. MASTER_ADDR alone does not: it is an
# address that clusters export everywhere, and says nothing of ranks.
_MEMBERSHIP = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
"""How many collectives torch remembers; it looks before the first process group is made."""
COLLECTIVES_REMEMBERED = 256
SECRET = "PACELINE_SECRET"
SECRET_FILE = "PACELINE_SECRET_FILE"
"""Who may take part in a run, see ``secret.py``: for launchers, never passed on to ranks."""
LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
LOG_FILE = "PACELINE_LOG_FILE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where a rank writes the error that ends it; the elastic agent's own name for it."""
_NEXT_STEP = (
    "Start the script with torchrun or `paceline train --script`, or unset these variables."
)


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
    """How often the elastic agent has restarted this world (``TORCHELASTIC_RESTART_COUNT``)."""
    store_is_hosted: bool
    """The launcher already serves the store at ``address:port``; no rank has to."""
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
    found = [name for name in _MEMBERSHIP if name in env]
    if not found:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in found)
        raise WorldError(f"{present} is set but {' and '.join(missing)} is not. {_NEXT_STEP}")
    size = _number(env, "WORLD_SIZE", minimum=1)
    rank = _number(env, "RANK")
    _below("RANK", rank, "WORLD_SIZE", size)
    address, port = _rendezvous(env, size)
    local_rank, local_size = _local(env, rank, size, address)
    nodes = _number(env, "GROUP_WORLD_SIZE", minimum=1, default=-(-size // local_size))
    node = _number(env, "GROUP_RANK", default=rank // local_size)
    _below("GROUP_RANK", node, "GROUP_WORLD_SIZE", nodes)
    return Environment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=address,
        port=port,
        restart_count=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
    )


def _rendezvous(env: Mapping[str, str], size: int) -> tuple[str | None, int | None]:
    """The address and port of the store; a single rank without an address needs none."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if not missing:
        port = _number(env, "MASTER_PORT", minimum=1)
        if port > 65535:
            raise WorldError(f"MASTER_PORT={port} is not a port: it must be from 1 to 65535.")
        return env["MASTER_ADDR"], port
    if size == 1:
        return None, None
    raise WorldError(
        f"WORLD_SIZE={size} but {' and '.join(missing)} is not set: {size} ranks need the host "
        f"name and a free port of rank 0 to meet. {_NEXT_STEP}"
    )


def _local(env: Mapping[str, str], rank: int, size: int, address: str | None) -> tuple[int, int]:
    """Rank and number of ranks on this machine, by the rule in ``read_environment``."""
    one_machine = size == 1 or (address is not None and is_loopback(address))
    if "LOCAL_WORLD_SIZE" in env:
        local_size = _number(env, "LOCAL_WORLD_SIZE", minimum=1)
    elif one_machine:
        local_size = size
    else:
        raise WorldError(
            f"LOCAL_WORLD_SIZE is not set, and MASTER_ADDR={address} is another machine's address, "
            f"so how many of the {size} ranks run on this one is unknown. Set LOCAL_WORLD_SIZE "
            "(and LOCAL_RANK) on every rank; torchrun and paceline do."
        )
    if local_size > size:
        raise WorldError(
            f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}: one machine cannot "
            "hold more ranks than the world."
        )
    local_rank = _number(env, "LOCAL_RANK", default=rank % local_size)
    _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return local_rank, local_size


def _number(
    env: Mapping[str, str], name: str, *, minimum: int = 0, default: int | None = None
) -> int:
    if name not in env and default is not None:
        return default
    text = env[name]
    try:
        value = int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number. {_NEXT_STEP}") from None
    if value < minimum:
        raise WorldError(f"{name}={value} must be {minimum} or more. {_NEXT_STEP}")
    return value


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise WorldError(
            f"{name}={value} with {limit_name}={limit}: {name} counts from 0 and must be below "
            f"{limit_name}. {_NEXT_STEP}"
        )


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
