"""``--on mpi``: mpirun starts one launcher on every host, and the launchers start the ranks.

One launcher a host rather than one process a rank: then ranks fail, hang, restart and save by the
same rules as everywhere else. What mpirun adds is getting to the hosts, and ending all of them
when one fails.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from paceline.config import Config
from paceline.config.fields import node_range
from paceline.errors import ConfigError
from paceline.launch.engines.base import ClusterJob, LaunchEngine
from paceline.launch.engines.local import newest_log, show_log
from paceline.launch.engines.mpi_command import find_mpi, host_command
from paceline.launch.engines.mpi_host import die_with_parent
from paceline.launch.engines.submission import Submission
from paceline.launch.environment import SECRET, SECRET_FILE
from paceline.launch.hosts import HostSlots, common_slots, hosts_of_section, implied_by
from paceline.launch.job import to_stderr
from paceline.launch.secret import find_secret
from paceline.launch.signals import LauncherSignals, stopping

_POLL_SECONDS = 0.1
_MORE_THAN_GRACE = 10.0
"""Seconds after that of the ranks, until mpirun is ended; and those that it has for it."""


class MpiEngine(LaunchEngine):
    """Hands a run to mpirun, and follows it to its end."""

    def problems(self, config: Config) -> list[str]:
        """What mpirun cannot do, and what is missing here."""
        found = []
        try:
            hosts = _hosts(config)
        except ConfigError as error:
            return list(error.problems)
        least, most = node_range(config.launch.nnodes)
        if least != most:
            found.append(
                f"launch.nnodes={config.launch.nnodes}: mpirun ends a job that loses a host; name "
                "one number of machines, or use --on ssh"
            )
        elif hosts and "nnodes" in config.launch.model_fields_set and most != len(hosts):
            found.append(
                f"launch.nnodes={config.launch.nnodes}, but {len(hosts)} hosts are named; make "
                f"them agree, like --nnodes {len(hosts)}, or leave nnodes out"
            )
        if not hosts and most > 1 and config.launch.rdzv is None:
            found.append(
                f"launch.nnodes={most} without hosts: name them with --hosts or --hostfile; where "
                "mpirun knows them by itself, in the job of a batch system, add --rdzv FIRST:PORT"
            )
        found += [
            f"launch.mpi.args: {word!r} cannot be a word for mpirun"
            for word in config.launch.mpi.args
            if not word or word == ":" or not word.isprintable()
        ]
        try:
            find_mpi(config.launch.mpi.mpirun)
        except ConfigError as error:
            found += error.problems
        return found

    def implied(self, config: Config) -> dict[str, str]:
        """The number of machines and of their ranks, where the hosts say it."""
        return implied_by(_hosts(config), config.launch)

    def gpus_per_machine(self, config: Config) -> int:
        """Those that ``launch.nproc`` asks for."""
        nproc = config.launch.nproc
        return nproc if isinstance(nproc, int) and config.launch.device == "cuda" else 0

    def plan(self, job: ClusterJob) -> str:
        """The command line, and what it has each host run."""
        started = shlex.join(_launcher(job))
        return f"{shlex.join(self._command(job))}\n# which runs on every host:\n{started}"

    def start(self, job: ClusterJob) -> int:
        """Run it to its end."""
        mpi = find_mpi(job.config.launch.mpi.mpirun)
        environment = {name: value for name, value in os.environ.items() if name != SECRET_FILE}
        if not sys.stdout.isatty():
            environment["TERM"] = "dumb"  # Open MPI gives every process a terminal
        if job.nodes[1] > 1:
            found = find_secret(job.config.launch.secret)
            value = secrets.token_urlsafe(32) if found is None else found.value.decode()
            environment[SECRET] = value
        job.submission.mkdir(parents=True, exist_ok=True)
        Submission(
            "mpi",
            str(os.getpid()),
            job.run,
            {"host": os.uname().nodename, "started": _started_at(os.getpid())},
        ).save()
        with LauncherSignals() as signals:
            process = subprocess.Popen(
                self._command(job),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is passed on by us, once
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
            )
            try:
                return _follow(process, signals, mpi.leave, job.config.launch.grace)
            finally:
                _end(process)

    def _command(self, job: ClusterJob) -> list[str]:
        mpi = find_mpi(job.config.launch.mpi.mpirun)
        hosts = [host.name for host in _hosts(job.config)]
        words = mpi.words(hosts, job.nodes[1], str(job.folder), _passed_on())
        return [*words, *job.config.launch.mpi.args, *host_command(_launcher(job))]

    def status(self, submission: Submission) -> str:
        """Whether the process that has mpirun still runs."""
        where = submission.details.get("host", "")
        if where != os.uname().nodename:
            return f"started by process {submission.job} on {where}: ask there"
        return f"process {submission.job} has mpirun" if _pid(submission) else "mpirun has ended"

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """What rank 0 has written since the run was last started."""
        alive = (lambda: _pid(submission) is not None) if follow else None
        show_log(newest_log(submission.run, 0), follow=alive)
        return 0

    def cancel(self, submission: Submission) -> str:
        """Send SIGTERM to the process that has mpirun: the ranks save and leave."""
        where = submission.details.get("host", "")
        if where != os.uname().nodename:
            raise ConfigError(f"{submission.run}: was started on {where!r}; cancel it there.")
        pid = _pid(submission)
        if pid is None:
            raise ConfigError(f"{submission.run}: mpirun has ended already.")
        os.kill(pid, signal.SIGTERM)
        return f"process {pid} was told to save and leave (SIGTERM)"


def _follow(
    process: subprocess.Popen[bytes],
    signals: LauncherSignals,
    leave: signal.Signals,
    grace: float,
) -> int:
    """Wait for mpirun, and pass signals on to it."""
    asked, deadline = False, 0.0
    while process.poll() is None:
        if signals.first is not None and not asked:
            asked = True
            to_stderr(stopping(signals.first, grace))
            process.send_signal(leave)
            deadline = time.monotonic() + grace + _MORE_THAN_GRACE
        if signals.insisted or (asked and time.monotonic() > deadline):
            break
        if signals.take_save():
            process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    if signals.first is not None:
        return 128 + signals.first
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of mpirun is left: its daemons end with it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_MORE_THAN_GRACE)
    if process.poll() is None:
        process.kill()
        process.wait()


def _pid(submission: Submission) -> int | None:
    """The process that started the run, unless its number belongs to another by now."""
    if not submission.job.isdecimal():
        return None
    pid = int(submission.job)
    began = _started_at(pid)
    return pid if began and began == submission.details.get("started") else None


def _started_at(pid: int) -> str:
    """When a process began, in the kernel's count: its number may be given to another later."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _hosts(config: Config) -> list[HostSlots]:
    """The hosts that the config names, in order; none: this machine, or what mpirun knows."""
    settings = config.launch.mpi
    found = hosts_of_section("launch.mpi", settings.hosts, settings.hostfile)
    key = "hosts" if settings.hosts else "hostfile"
    try:
        _check_slots(config, found)
    except ValueError as error:
        raise ConfigError(f"launch.mpi.{key}: {error}") from None
    for host in found:
        if host.user is not None or host.port is not None:
            raise ConfigError(
                f"launch.mpi.{key}: {host}: mpirun takes users and ports from ssh's own config; "
                f"write {host.name}, and put them there"
            )
    return found


def _check_slots(config: Config, hosts: Sequence[HostSlots]) -> None:
    slots, named = common_slots(hosts), config.launch.nproc
    if slots is not None and named not in ("auto", slots):
        raise ValueError(f"the hosts have {slots} slots each, but launch.nproc is {named}")


def _launcher(job: ClusterJob) -> list[str]:
    """The command of the launcher on every host."""
    config = job.config
    if job.nodes[1] == 1:
        return job.launcher()
    hosts = _hosts(config)
    rdzv = config.launch.rdzv or f"{_bracketed(hosts[0].name)}:{config.launch.mpi.port}"
    return job.launcher(rdzv=rdzv)


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _passed_on() -> list[str]:
    """The variables that the launchers on other hosts get of this process's own."""
    begin = ("NCCL_", "GLOO_", "OMP_", "TORCH_", "PACELINE_")
    named = (SECRET, "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PATH", "TERM")
    found = [name for name in os.environ if name.startswith(begin) or name in named]
    return sorted({*found, SECRET, "TERM"} - {SECRET_FILE})
