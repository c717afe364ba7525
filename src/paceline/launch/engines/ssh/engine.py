"""The engine of ``--on ssh``."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import secrets
import shlex
import signal
import socket
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from paceline.config import Config
from paceline.config.endpoints import Endpoint, endpoints
from paceline.config.fields import node_range
from paceline.errors import ConfigError
from paceline.launch.engines.base import ClusterJob, LaunchEngine
from paceline.launch.engines.local import show_log
from paceline.launch.engines.ssh.preflight import Placement, Preflight, RemoteHost, pythons
from paceline.launch.engines.ssh.record import RunOfHosts, ask_hosts
from paceline.launch.engines.ssh.session import opened_by_hand, option_problems, ssh_command
from paceline.launch.engines.ssh.supervisor import HostFollower, LauncherOrder, Supervisor
from paceline.launch.engines.submission import Submission
from paceline.launch.hosts import HostSlots, common_slots, hosts_of_section, implied_by
from paceline.launch.run_folder import SUBMISSION, RunFolder, holder_of
from paceline.launch.secret import find_secret
from paceline.untrusted import open_to_append, printable, write_private

_OUTPUT = "output.log"
_MOST_AT_ONCE = 64


class SshEngine(LaunchEngine):
    """Starts a launcher on every host over ssh, and follows the run to its end."""

    def problems(self, config: Config) -> list[str]:
        """What is wrong with the hosts, and with what is said of them elsewhere."""
        problems = option_problems(config.launch.ssh)
        try:
            hosts = hosts_of(config)
        except ConfigError as error:
            return [*problems, *error.problems]
        return [*problems, *_contradictions(config, hosts)]

    def implied(self, config: Config) -> dict[str, str]:
        """The number of machines and of their ranks, where the hosts say it."""
        return implied_by(hosts_of(config), config.launch)

    def gpus_per_machine(self, config: Config) -> int:
        """As many as it has ranks, where they are to run on GPUs; else nothing is known here."""
        nproc = config.launch.nproc
        return nproc if config.launch.device == "cuda" and isinstance(nproc, int) else 0

    def plan(self, job: ClusterJob) -> str:
        """The connections and the launcher's command; a port and a secret are chosen later."""
        ssh, hosts = job.config.launch.ssh, hosts_of(job.config)
        rdzv = job.config.launch.rdzv or f"{ssh.address or hosts[0].name}:PORT"
        launcher = job.launcher(
            python=pythons(ssh)[0],
            rdzv=rdzv if len(hosts) > 1 else None,
            secret_file="SECRET_FILE" if len(hosts) > 1 else None,
        )
        lines = ["# The connections, one for each host:"]
        lines += [shlex.join(ssh_command(ssh, host)) for host in hosts]
        lines += ["", "# What each host is asked to run, over its connection:"]
        lines += [f"cd {shlex.quote(str(job.folder))}", shlex.join(launcher)]
        return "\n".join(lines)

    def start(self, job: ClusterJob) -> int:
        """Check the hosts, start their launchers, follow them to the end."""
        hosts = hosts_of(job.config)
        job.submission.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            _hold(job, stack)
            console = _Console(job.submission / _OUTPUT, [str(host) for host in hosts], stack)
            Submission("ssh", str(os.getpid()), job.run, {"machine": socket.gethostname()}).save()
            record = RunOfHosts(run_id(job.run), job.config.launch.ssh, tuple(hosts))
            record.save()
            connections = stack.enter_context(opened_by_hand(record.ssh, hosts))
            preflight = Preflight(job, hosts, record.run_id, console.say, connections)
            stack.callback(preflight.close)
            placement = preflight.run()
            if placement.archive is not None:
                stack.enter_context(placement.archive.file)
            return _follow(job, preflight.hosts, placement, record, console)

    # ------------------------------------------------------------- a run that was started

    def status(self, submission: Submission) -> str:
        """Which process follows the run, and what its hosts say."""
        pid = holder_of(submission.run / SUBMISSION)
        followed = f"followed by process {pid}" if pid else "followed by no process here"
        record = RunOfHosts.load(run_id(submission.run))
        if record is None:
            where = submission.details.get("machine", "?")
            return f"{followed}; it was started on {where}, and nothing is known of it here"
        return "; ".join([followed, *(f"{host}: {said}" for host, said in ask_hosts(record))])

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """What the launchers of all hosts printed."""
        folder = submission.run / SUBMISSION
        if not (folder / _OUTPUT).exists():
            raise ConfigError(f"{submission.run}: no output of its hosts is here, so far.")
        show_log(
            folder / _OUTPUT, follow=(lambda: holder_of(folder) is not None) if follow else None
        )
        return 0

    def cancel(self, submission: Submission) -> str:
        """End the run on all hosts: by the command that follows it, else by its hosts."""
        pid = holder_of(submission.run / SUBMISSION)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            return f"process {pid} was told to end the run on all hosts (SIGTERM)"
        record = RunOfHosts.load(run_id(submission.run))
        if record is None:
            raise ConfigError(
                f"{submission.run}: no process here follows this run, and its hosts are not known "
                f"here; it was started on {submission.details.get('machine', '?')}."
            )
        return "; ".join(f"{host}: {said}" for host, said in ask_hosts(record, order="int"))


def hosts_of(config: Config) -> list[HostSlots]:
    """The hosts that a config names; ``ConfigError`` where it names none, or wrongly."""
    found = hosts_of_section("launch.ssh", config.launch.ssh.hosts, config.launch.ssh.hostfile)
    if not found:
        raise ConfigError(
            "launch.on=ssh needs hosts: --hosts node0:4,node1:4, --hostfile FILE, or "
            "launch.ssh.hosts"
        )
    return found


def _contradictions(config: Config, hosts: list[HostSlots]) -> list[str]:
    """The hosts against launch.nnodes and launch.nproc."""
    launch, problems = config.launch, []
    _, most = node_range(launch.nnodes)
    if "nnodes" in launch.model_fields_set and most != len(hosts):
        problems.append(
            f"launch.nnodes={launch.nnodes}, but {len(hosts)} hosts are named; make them agree, "
            f"like --nnodes {len(hosts)} or --nnodes 1:{len(hosts)}, or leave nnodes out"
        )
    try:
        slots = common_slots(hosts)
    except ValueError as error:
        return [*problems, f"launch.ssh.hosts: {error}; every machine of a run has as many ranks"]
    if slots is None and launch.nproc == "auto":
        problems.append(
            "launch.nproc=auto: how many ranks other machines can have is not known here; write "
            f"{hosts[0].name}:4 for 4 on each host, or --nproc 4"
        )
    elif slots is not None and launch.nproc not in ("auto", slots):
        problems.append(
            f"launch.nproc={launch.nproc}, but the hosts have {slots} slots each; make them agree"
        )
    if launch.ssh.address is not None:
        try:
            endpoints(str(Endpoint(launch.ssh.address, 1)))
        except ValueError:
            problems.append(f"launch.ssh.address={launch.ssh.address!r} is no host or address")
    if launch.ssh.folder.startswith("~") and not launch.ssh.folder.startswith("~/"):
        problems.append(f"launch.ssh.folder={launch.ssh.folder!r} must begin with / or ~/")
    return problems


def run_id(run: Path) -> str:
    """What hosts call a run: its name, and a number for where it is."""
    place = f"{socket.gethostname()}:{os.path.abspath(run)}"
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in run.name)[:40]
    return f"{name.strip('-') or 'run'}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:10]}"


def _hold(job: ClusterJob, stack: contextlib.ExitStack) -> None:
    """Keep a second command from following the same run."""
    try:
        stack.enter_context(RunFolder(job.submission).in_use())
    except ConfigError:
        raise ConfigError(
            f"run {str(job.run)!r} is followed by process {holder_of(job.submission) or '?'} "
            "already; wait for it to end, or end it with: paceline runs cancel RUN"
        ) from None


def _follow(
    job: ClusterJob,
    hosts: list[RemoteHost],
    placement: Placement,
    record: RunOfHosts,
    console: _Console,
) -> int:
    launch = job.config.launch
    there = dataclasses.replace(job, run=placement.run)
    several = len(hosts) > 1
    secret = find_secret(launch.secret)
    value = secrets.token_urlsafe(32) if secret is None else secret.value.decode()

    def command(python: str, secret_file: str) -> list[str]:
        file = secret_file if several else None
        rdzv = placement.rdzv if several else None
        return there.launcher(python=python, rdzv=rdzv, secret_file=file, train=placement.train)

    order = LauncherOrder(
        command, value if several else None, launch.ssh.setup, launch.ssh.linger, launch.grace
    )
    stamp = int(time.time())
    followers = [HostFollower(host, placement, order, console.show, stamp) for host in hosts]
    least, _ = job.nodes
    supervisor = Supervisor(
        followers, least, launch.grace, launch.rejoin_timeout, console.say, launch.ssh.linger
    )
    try:
        status = supervisor.run()
        if not placement.shared_run:
            _bring_back(followers, job.run, console)
        if all(follower.ended and follower.was_reached for follower in followers):
            record.forget()
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(followers))) as pool:
            list(pool.map(HostFollower.clean, followers))
        return status
    finally:
        for follower in followers:
            follower.close()


def _bring_back(followers: list[HostFollower], run: Path, console: _Console) -> None:
    """Bring the run's config, events and logs from the host that was node 0 at last."""
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(followers))) as pool:
        answers = list(pool.map(HostFollower.collect, followers))
    found = [
        (answer, follower.host)
        for answer, follower in zip(answers, followers, strict=True)
        if answer is not None
    ]
    if not found:
        return
    answer, host = max(found, key=lambda one: float(one[0]["written"]))
    count = _unpack(answer, run)
    more = "; there is more of them there" if answer.get("left_out") else ""
    console.say(f"{count} files of the run were copied from {host} to {run}{more}")


def _unpack(answer: dict[str, Any], run: Path) -> int:
    """Write the files of an archive that a host sent; their names lead nowhere else."""
    count = 0
    with tarfile.open(fileobj=io.BytesIO(answer["data"]), mode="r:gz") as archive:
        for member in archive:
            parts = Path(member.name).parts
            source = archive.extractfile(member) if member.isreg() else None
            if source is None or ".." in parts or Path(member.name).is_absolute():
                continue
            target = run.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_private(target, source.read())
            count += 1
    return count


class _Console:
    """What the hosts print, line by line with the host's name, on the screen and in a file."""

    def __init__(self, log: Path, names: list[str], stack: contextlib.ExitStack) -> None:
        self._width = max(map(len, names))
        self._lock = threading.Lock()
        descriptor = open_to_append(log, 0o600)
        self._log: TextIO = stack.enter_context(
            os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")
        )

    def show(self, host: RemoteHost, line: str) -> None:
        """Print a line that belongs to a host."""
        self._print(f"{host!s:{self._width}} | {line}", sys.stdout)

    def say(self, line: str) -> None:
        """Print a line of this command's own."""
        self._print(line, sys.stderr)

    def _print(self, line: str, stream: TextIO) -> None:
        text = printable(line.expandtabs(), one_line=True)
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._log.write(text + "\n")
            self._log.flush()
            stream.write(text + "\n")
            stream.flush()
