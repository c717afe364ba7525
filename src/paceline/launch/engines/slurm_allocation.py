"""``paceline train`` inside an allocation of SLURM: started by srun once on every node of it.

Typed in a shell of ``salloc`` or in a batch script, the command starts itself on all nodes. Started
by the user's own ``srun``, once on each node, the launchers find each other by SLURM's variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config import Config
from paceline.errors import ConfigError, LaunchError
from paceline.launch.engines.base import ClusterJob
from paceline.launch.engines.slurm import SlurmEngine, prepare, take_back
from paceline.launch.engines.slurm_commands import need, run_command, tell_step
from paceline.launch.engines.slurm_script import SECRET, srun
from paceline.launch.engines.submission import Submission
from paceline.launch.launchers import in_slurm_step
from paceline.launch.master_address import slurm_port
from paceline.launch.signals import LauncherSignals
from paceline.launch.slurm_nodes import first_host

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Allocation:
    """A job of SLURM that this process is in, but no task of."""

    job: str
    nodes: int
    node_list: str
    on_node: bool
    """This process runs on one of its nodes; else, say, in a shell of salloc on a login node."""

    @property
    def rdzv(self) -> str:
        """Where the launchers of a run meet that is started now."""
        port = slurm_port(int(self.job), os.getpid())
        return f"{reachable(first_host(self.node_list))}:{port}"


def allocation_of(env: Mapping[str, str] | None = None) -> Allocation | None:
    """The allocation around this process; ``None`` in a task of ``srun``, and outside of SLURM."""
    env = os.environ if env is None else env
    job, nodes = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NUM_NODES", "")
    node_list = env.get("SLURM_JOB_NODELIST", "")
    if in_slurm_step(env) or not (job.isdecimal() and nodes.isdecimal() and node_list):
        return None
    return Allocation(job, int(nodes), node_list, bool(env.get("SLURMD_NODENAME")))


def launchers_of_step(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``launch.nnodes`` and ``launch.rdzv`` for a launcher that ``srun`` started on each node.

    Empty for one that it started alone. ``ConfigError`` for several on a node: ``command`` is what
    was typed.
    """
    env = os.environ if env is None else env
    if not in_slurm_step(env):
        return {}
    tasks, nodes = (_number(env, name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"))
    if tasks <= 1:
        return {}
    if tasks > nodes:
        one_each = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", *command]
        raise ConfigError(
            f"srun started {tasks} tasks on {_count(nodes)}, and each of them is a launcher, which "
            f"starts the ranks of its node itself. Start one on every node: {shlex.join(one_each)}"
        )
    host = reachable(first_host(env.get("SLURM_STEP_NODELIST", "")))
    port = slurm_port(_number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID"))
    return {"launch.nnodes": str(nodes), "launch.rdzv": f"{host}:{port}"}


class SlurmAllocation(SlurmEngine):
    """Starts a run in the allocation that there is, and follows it to its end."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation

    def problems(self, config: Config) -> list[str]:
        """Whether the allocation has as many nodes as are asked for."""
        least = int(str(config.launch.nnodes).partition(":")[0])
        if least <= self._allocation.nodes:
            return []
        return [
            f"launch.nnodes={config.launch.nnodes}, but SLURM job {self._allocation.job} has "
            f"{_count(self._allocation.nodes)} ({self._allocation.node_list}); ask for fewer, or "
            "use --on local for this machine alone"
        ]

    def gpus_per_machine(self, config: Config) -> int:
        """As many as the allocation has on each node."""
        found = re.search(r"([0-9]+)$", os.environ.get("SLURM_GPUS_PER_NODE", ""))
        on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(found[1]) if found else int(on_node) if on_node.isdecimal() else 0

    def plan(self, job: ClusterJob) -> str:
        """The command."""
        return shlex.join(self._words(job, "paceline"))

    def start(self, job: ClusterJob) -> int:
        """Run srun to its end; the status that it, or a signal, leaves with."""
        need("srun")
        step = f"paceline-{os.getpid()}"
        prepare(job)
        Submission("slurm", self._allocation.job, job.run, {"step": step}).save()
        with LauncherSignals() as signals:
            # In a session of its own: a Ctrl-C is passed on by us, as srun would not do it.
            try:
                process = subprocess.Popen(
                    self._words(job, step), stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                take_back(job)
                raise LaunchError(f"srun cannot be started: {error.strerror}.") from error
            status = _follow(process, signals, self._allocation.job, step)
        if signals.first is not None and status:
            return 128 + signals.first
        return status

    def _words(self, job: ClusterJob, step: str) -> list[str]:
        nodes = min(job.nodes[1], self._allocation.nodes)
        rdzv = job.config.launch.rdzv
        secret = None if rdzv is None else str(job.submission / SECRET)
        launcher = job.launcher(rdzv=rdzv, secret_file=secret)
        first, *rest = srun(job, str(nodes))
        return [first, f"--job-name={step}", f"--chdir={job.folder}", *rest, *launcher]


def _follow(process: subprocess.Popen[bytes], signals: LauncherSignals, job: str, step: str) -> int:
    told = insisted = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        if signals.first is not None and not told:
            told = True
            if not tell_step(job, step, "TERM"):
                process.terminate()
        if signals.insisted and not insisted:
            insisted = True
            process.terminate()  # srun then ends the step by force
        if signals.take_save():
            tell_step(job, step, "USR1")


def reachable(host: str) -> str:
    """A node by its name where that is known here, else by the address that SLURM has for it."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        with contextlib.suppress(LaunchError):
            found = re.search(r"NodeAddr=(\S+)", run_command(["scontrol", "show", "node", host]))
            return found[1] if found else host
    return host


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"srun started this process, but {name}={text!r} is no number. Start it with srun "
            "--ntasks-per-node=1, and pass SLURM's variables on (no --export=NONE)."
        )
    return int(text)


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
