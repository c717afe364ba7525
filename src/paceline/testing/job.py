"""One job on live ranks: send it, wait for all, find who failed first, clean up."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from paceline.errors import RankFailed
from paceline.testing.process import LiveRank, RankServer

if TYPE_CHECKING:
    from paceline.testing.rank import Outcome

_GRACE = 3.0
"""Seconds the other ranks get to end by themselves once one has failed."""
_CLEAN_UP = 10.0
"""Seconds a rank gets to clean up after a job."""
_CASCADE = 1.0
"""A crash makes the peers raise; one seen this long after their errors still came first."""
_OUTPUT_SHOWN = 3000

_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
}


@dataclass
class _Crash:
    """A rank that ended without a word."""

    exit_code: int
    time: float = field(default_factory=time.monotonic)


def run_job(
    ranks: list[LiveRank],
    call: bytes,
    server: RankServer,
    broken: set[LiveRank],
    *,
    timeout: float,
    join: bool,
    device: str,
) -> list[Any]:
    """The results by rank; removes from ``broken`` the ranks that are fit for another job."""
    import torch.distributed as dist

    # This process serves the store, on a port the system picks: no race for a free one, and a
    # rank that dies does not take it along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, rank in enumerate(ranks):
        rank.send(_job(call, number, len(ranks), store.port, timeout, join, device))
    ends = _wait_for_ends(ranks, server, timeout)
    _clean_up(ranks, ends, broken)
    del store
    return [pickle.loads(end.result) for end in ends]


def server_environment() -> dict[str, str]:
    """What the server and idle ranks see: this process's environment without a launcher's place."""
    kept = {k: v for k, v in os.environ.items() if not _is_launchers(k)}
    # Ranks import the same paceline as this process, installed or not.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, **_ONE_THREAD, "PYTHONPATH": path}
