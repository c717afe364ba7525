"""Where the ranks of SLURM and MPI meet: neither sets ``MASTER_ADDR`` and ``MASTER_PORT``.

What is set counts. Otherwise:

- all ranks on one host: at its loopback address;
- SLURM on several nodes: on the first host of the step, which has rank 0;
- MPI on several hosts: an error that names what to export. No variable of theirs says which host
  rank 0 is on.

The port is one of 20000 to 29999, derived from what names the job, so that all ranks arrive at the
same one: under SLURM from the numbers of job and step (64 steps of a job, and those of the next
150 jobs, differ); else from a hash of the name that the MPI gives it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import WorldError
from paceline.launch.launchers import HYDRA, SLURM, Launcher
from paceline.launch.slurm_nodes import first_host

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20000, 10000
_STEPS_OF_A_JOB = 64
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PROXY = "hydra_pmi_proxy"
"""Hydra's process on each host, from which all ranks there descend."""


def derived_address(
    env: Mapping[str, str], launcher: Launcher, *, rank: int, one_host: bool
) -> str:
    """The address of rank 0's host, where ``MASTER_ADDR`` is not set."""
    if one_host:
        return LOOPBACK
    if launcher is not SLURM:
        raise WorldError(
            f"{launcher.name} started ranks on several hosts, and MASTER_ADDR is not set: none of "
            f"its variables says which host rank 0 is on. Export it for all ranks: "
            f"{launcher.export.format(address='host1', port=29500)} …, where host1 is the first "
            "of your hosts."
        )
    name = next((name for name in _NODE_LISTS if env.get(name)), None)
    if name is None:
        raise WorldError(
            f"{launcher.name} started ranks on several nodes, but neither MASTER_ADDR nor "
            f"{' nor '.join(_NODE_LISTS)} is set. {launcher.fix}"
        )
    host = first_host(env[name])
    own_order = env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if own_order or (rank == 0 and env.get("SLURMD_NODENAME", host) != host):
        raise WorldError(
            f"{name}={env[name]} begins with {host}, but the tasks were distributed in an order of "
            "your own (srun --distribution=arbitrary), so that task 0 may be on another node. Name "
            f"it yourself: {launcher.export.format(address='NODE', port=29500)} …"
        )
    return host


def derived_port(env: Mapping[str, str], launcher: Launcher, *, one_host: bool) -> int:
    """The port there, the same on every rank, where ``MASTER_PORT`` is not set."""
    if launcher is SLURM:
        job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
        if job.isdecimal() and step.isdecimal():
            return slurm_port(int(job), int(step))
    named = next((env[name] for name in launcher.job if env.get(name)), None)
    if named is None and launcher is HYDRA and one_host:
        named = _proxy_of(os.getpid())
    if named is None:
        raise WorldError(
            f"{launcher.name} started this rank, MASTER_PORT is not set, and nothing names the job "
            "from which one could be derived. Export a free one for all ranks: "
            f"{launcher.export.format(address='host1', port=29500)} …"
        )
    return _FIRST_PORT + zlib.crc32(named.encode()) % _PORTS


def slurm_port(job: int, step: int) -> int:
    """The port of a step of a SLURM job."""
    return _FIRST_PORT + (job * _STEPS_OF_A_JOB + step) % _PORTS


def _proxy_of(process: int) -> str | None:
    """Names Hydra's proxy that a process descends from; ``None`` where that cannot be seen."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            # "PID (name) state parent …", and the name may hold anything.
            text = Path(f"/proc/{process}/stat").read_text(errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            if name == _PROXY:
                return f"{_PROXY} {process}"
            process = int(rest.split()[1])
    return None
