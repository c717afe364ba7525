"""The variables that tell a rank its place: torchrun's, which ``environment`` reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch import worker
from paceline.launch.logs import RankLogs


@dataclass(frozen=True)
class Place:
    """A world as one of its nodes sees it: ``first`` is the lowest of its ``local_size`` ranks."""

    size: int
    first: int
    local_size: int
    node: int
    nodes: int
    """Those that have ranks; others stand by."""
    address: str
    port: int
    restart_count: int
    max_restarts: int
    run_id: str

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first, self.first + self.local_size)


def used_parts(nprocs: Sequence[int], used: int) -> list[int]:
    """How many ranks of each node are below ``used``, where node ``k`` has ``nprocs[k]``."""
    if not 0 <= used <= sum(nprocs):
        raise ValueError(f"{used} ranks cannot be used of a world of {sum(nprocs)}.")
    bases = [sum(nprocs[:node]) for node in range(len(nprocs))]
    return [max(0, min(nproc, used - base)) for base, nproc in zip(bases, nprocs, strict=True)]


def loopback_interfaces() -> dict[str, str]:
    """What has Gloo and NCCL listen on loopback alone: for ranks that are all on this machine.

    Left out is what the user has set. By itself Gloo takes the address of the host's name, and
    NCCL that of the first interface, where other machines reach them.
    """
    if sys.platform != "linux":
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def variables(place: Place, rank: int, logs: RankLogs) -> dict[str, str]:
    """The environment of a rank, beside what all processes get."""
    return {
        **(loopback_interfaces() if place.nodes == 1 else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(rank - place.first),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(place.size),
        "ROLE_NAME": "rank",
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # As torchrun does: a NCCL collective that fails ends its rank instead of leaving it stuck.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        worker.ERROR_FILE: str(logs.error_file(rank)),
        worker.LOG_FILE: str(logs.log(rank).absolute()),
    }
