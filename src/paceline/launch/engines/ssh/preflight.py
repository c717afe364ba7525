"""Before a run: whether every host is ready, and where it finds code and run; all at once."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.endpoints import Endpoint
from paceline.config.launch_engines import Ssh
from paceline.errors import LaunchError
from paceline.formatting import plural
from paceline.launch.engines.base import ClusterJob
from paceline.launch.engines.ssh.session import (
    ConnectionLost,
    RemoteSession,
    host_name,
    is_plain_path,
    ssh_command,
)
from paceline.launch.engines.ssh.shipping import Archive, folders_of, pack, relocated
from paceline.launch.hosts import HostSlots
from paceline.untrusted import printable
from paceline.version import __version__

_ANSWER_SECONDS = 180.0
_PORTS = range(20000, 30000)
_MOST_AT_ONCE = 64
_MOST_STAND_INS = 3


@dataclass
class RemoteHost:
    """A host of the run: how it is reached, and what it answered."""

    host: HostSlots
    number: int
    command: list[str]
    session: RemoteSession | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    unreachable: bool = False

    def __str__(self) -> str:
        return str(self.host)

    @property
    def folder(self) -> str:
        """The run's own folder on this host."""
        return str(self.facts["folder"])


@dataclass(frozen=True)
class Placement:
    """Where the hosts find the run and its code."""

    run: Path
    shared_run: bool
    work: str
    train: list[str]
    code: str | None
    rdzv: str | None
    question: dict[str, Any]
    """What a host that comes later is asked first."""
    archive: Archive | None = None

    def deliver(self, host: RemoteHost, session: RemoteSession) -> None:
        """Ask a host whether it is ready, and copy the code to it where it has none.

        Raises ``LaunchError`` where it is not.
        """
        host.facts = session.ask(self.question, seconds=_ANSWER_SECONDS)
        if (problem := _problem_of(host.facts)) is not None:
            raise LaunchError(problem)
        if self.archive is not None and self.code is not None:
            self.archive.send(session, self.code, host.folder)


class Preflight:
    """Asks all hosts of a run, and raises one ``LaunchError`` with every problem there is."""

    def __init__(
        self,
        job: ClusterJob,
        hosts: Sequence[HostSlots],
        run_id: str,
        say: Callable[[str], None],
        connections: Sequence[str | None],
    ) -> None:
        self._job, self._ssh, self._say = job, job.config.launch.ssh, say
        self._code = folders_of(job)
        self.hosts = [
            RemoteHost(host, number, ssh_command(self._ssh, host, connection))
            for number, (host, connection) in enumerate(zip(hosts, connections, strict=True))
        ]
        self._question: dict[str, Any] = {
            "do": "check",
            "folder": self._ssh.folder,
            "run": run_id,
            "python": pythons(self._ssh),
            "setup": self._ssh.setup,
            "cwd": str(self._code.work),
            "marks": [],
            "ports": [],
        }
        self._is_shared = self._run_is_shared = False

    def run(self) -> Placement:
        """Check the hosts, and copy the code to them where they do not see it."""
        count = len(self.hosts)
        self._say(f"checking {plural(count, 'host')}: {', '.join(map(str, self.hosts))}")
        self._ask_all()
        self._refuse_problems()
        rdzv = self._rendezvous() if count > 1 else None
        self._check_folders()
        self._refuse_problems()
        archive = None if self._is_shared else self._pack()
        code = None
        if archive is not None:
            code = f"{self.ready[0].folder}/code-{archive.digest}"
            self._ship(archive, code)
        run = self._job.run if self._run_is_shared else Path(self.ready[0].folder) / "run"
        work, train = str(self._code.work), list(self._job.train)
        if code is not None:
            work = self._code.on_host(work, code) or code
            train = relocated(self._job, self._code, code)
        return Placement(run, self._run_is_shared, work, train, code, rdzv, self._question, archive)

    @property
    def ready(self) -> list[RemoteHost]:
        """The hosts that answered, and have no problem."""
        return [host for host in self.hosts if host.problem is None]

    def close(self) -> None:
        """End the connections."""
        for host in self.hosts:
            if host.session is not None:
                host.session.close()

    # ------------------------------------------------------------- questions

    def _ask_all(self) -> None:
        ports = random.Random(secrets.randbits(64)).sample(_PORTS, 8)
        with _marked([*self._code.folders, self._job.submission]) as marks:
            seen = [mark for mark in marks if mark is not None]
            request = {**self._question, "marks": seen, "ports": ports}
            _on_all(self.hosts, lambda host: self._check(host, request))
            if not self.ready:
                return
            *code, run = [
                mark is not None and all(host.facts["sees"].get(mark) for host in self.ready)
                for mark in marks
            ]
        self._run_is_shared = run
        self._is_shared = all(code) and self._ssh.code != "copy"
        if self._ssh.code == "shared" and not all(code):
            blind = [
                host
                for host in self.ready
                if not all(mark and host.facts["sees"].get(mark) for mark in marks[:-1])
            ]
            for host in blind or self.ready:
                host.problem = (
                    f"does not see {', '.join(map(str, self._code.folders))} of this machine, but "
                    "launch.ssh.code=shared; leave that out and the code is copied"
                )

    def _check(self, host: RemoteHost, request: dict[str, Any]) -> None:
        host.session = RemoteSession(host.command)
        try:
            host.facts = host.session.ask(request, seconds=_ANSWER_SECONDS)
        except ConnectionLost as error:
            host.problem, host.unreachable = f"cannot be used over ssh: {error}", True
            return
        host.problem = _problem_of(host.facts)

    def _rendezvous(self) -> str:
        """Where the launchers meet: at the first host, and at others if it cannot split the run."""
        launch = self._job.config.launch
        if launch.rdzv is not None:
            return launch.rdzv
        least, most = self._job.nodes
        first = self._ssh.address or host_name(self._ssh, self.ready[0].host)
        names = [first]
        if 2 * least > most > 2:  # only then may another one stand in: see docs/guides/elastic.md
            others = self.ready[1:_MOST_STAND_INS]
            names += [host_name(self._ssh, host.host) for host in others]
        free = [set(map(int, host.facts["ports"])) for host in self.ready]
        port = next(iter(sorted(set.intersection(*free))), None)
        if port is None:
            raise LaunchError("the hosts have no free port in common; name one with --rdzv")
        self._check_names(names)
        return ",".join(str(Endpoint(name, port)) for name in names)

    def _check_names(self, names: list[str]) -> None:
        """Every host must know the names by which it is to reach the others."""

        def look(host: RemoteHost) -> None:
            request = {"do": "look", "names": names}
            try:
                assert host.session is not None
                host.facts["look"] = host.session.ask(request, seconds=_ANSWER_SECONDS)
            except ConnectionLost as error:
                host.problem, host.unreachable = f"cannot be used over ssh: {error}", True

        _on_all(self.ready, look)
        owners = dict(zip(names, self.ready, strict=False))
        for host in self.ready:
            for name in names:
                found = [str(one) for one in host.facts["look"]["addresses"].get(name, [])]
                if not found:
                    host.problem = f"does not know the name {name!r}, {_HOW_TO_NAME}"
                elif owners[name] is not host and all(map(_is_loopback, found)):
                    host.problem = f"takes {name!r} for itself ({found[0]}), {_HOW_TO_NAME}"

    def _check_folders(self) -> None:
        """What lies in launch.ssh.folder must have the same path on every host."""
        if self._is_shared and self._run_is_shared:
            return
        first = self.ready[0]
        for host in self.ready[1:]:
            if host.folder != first.folder:
                host.problem = (
                    f"launch.ssh.folder={self._ssh.folder} is {host.folder} there, but "
                    f"{first.folder} on {first}; name one path that every host can have"
                )
        if self._run_is_shared:
            return
        if self._job.resume:
            for host in self.ready:
                host.problem = (
                    f"does not see the run folder {self._job.run}; the run goes on where it was "
                    "with the command that started it and --run-dir RUN --resume auto"
                )

    def _refuse_problems(self) -> None:
        """Go on without hosts that do not answer where enough others do; else raise."""
        least, _ = self._job.nodes
        bad = [host for host in self.hosts if host.problem is not None]
        if all(host.unreachable for host in bad) and len(self.ready) >= least:
            for host in bad:
                self._say(f"{host} {host.problem}; the run starts without it")
                if host.session is not None:
                    host.session.close()
                    host.session = None
            self._check_torch()
            bad = [host for host in self.hosts if host.problem and not host.unreachable]
        if not bad:
            return
        width = max(len(str(host)) for host in bad)
        lines = [printable(f"  {host!s:{width}}  {host.problem}", one_line=True) for host in bad]
        count = len(self.hosts)
        raise LaunchError(
            f"{len(bad)} of {plural(count, 'host')} cannot take part; nothing was started:\n"
            + "\n".join(lines)
        )

    def _check_torch(self) -> None:
        found = {str(host.facts["torch"]) for host in self.ready}
        if len(found) > 1:
            for host in self.ready:
                host.problem = (
                    f"has torch {host.facts['torch']}; all hosts must have the same one "
                    f"({', '.join(sorted(found))} are there)"
                )

    # ------------------------------------------------------------- code

    def _pack(self) -> Archive:
        archive = pack(self._code, self._ssh.most_mib)
        folders = ", ".join(map(str, self._code.folders))
        self._say(f"copying {folders} to {plural(len(self.ready), 'host')}: {archive}")
        return archive

    def _ship(self, archive: Archive, target: str) -> None:
        for host in self.ready:  # one after the other: they share this machine's line
            try:
                assert host.session is not None
                archive.send(host.session, target, host.folder)
            except ConnectionLost as error:
                host.problem = f"the code could not be copied there: {error}"
        self._refuse_problems()


_HOW_TO_NAME = (
    "where the launchers meet; set launch.ssh.address to the first host's name or address as the "
    "other hosts reach it"
)


def pythons(ssh: Ssh) -> list[str]:
    """Which Python starts the launcher: the one asked for, else this one's path, else any."""
    if ssh.python is not None:
        return [ssh.python]
    return [sys.executable, "python3"] if is_plain_path(sys.executable) else ["python3"]


def _problem_of(facts: dict[str, Any]) -> str | None:
    """Why a host that answered cannot take part."""
    if facts.get("problem"):
        return str(facts["problem"])
    python, version = facts.get("python"), facts.get("paceline")
    if version is None:
        return (
            f"has no paceline in {python}; install paceline=={__version__} there, or set "
            "launch.ssh.python to the Python that has it"
        )
    if version != __version__:
        return f"has paceline {version} in {python}, this machine {__version__}: install the same"
    if facts.get("torch") is None:
        return f"has no torch in {python}; install it there, or set launch.ssh.python"
    if lives := facts.get("lives"):
        return (
            f"still has a launcher of this run (process {lives[0]}), whose command was lost; it "
            "ends by itself, or at once with: paceline runs cancel RUN"
        )
    return None


def _on_all(hosts: Sequence[RemoteHost], work: Callable[[RemoteHost], None]) -> None:
    pool = ThreadPoolExecutor(min(_MOST_AT_ONCE, len(hosts)))
    try:
        list(pool.map(work, hosts))
    except BaseException:
        for host in hosts:  # or a Ctrl-C would wait for hosts that do not answer
            if host.session is not None:
                host.session.close()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _marked(folders: Sequence[Path]) -> Iterator[list[str | None]]:
    """A file of a random name in each folder, by which others know it; ``None``: not writable."""
    made: list[str | None] = []
    name = f".paceline-{secrets.token_hex(8)}"
    try:
        for folder in folders:
            try:
                (folder / name).touch(exist_ok=False)
                made.append(str(folder / name))
            except OSError:
                made.append(None)
        yield made
    finally:
        for path in made:
            if path is not None:
                Path(path).unlink(missing_ok=True)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
