"""Hosts in network namespaces with a real sshd each, and ``paceline train --on ssh`` on another."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_cases import CONFIG, MODULE, wait_for

from paceline import events
from paceline.events import StepDone
from paceline.testing.hosts import Host, Hosts, hosts_available
from paceline.testing.leaks import serves_the_session
from paceline.testing.processes import command_line

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PORT = 2222
NAMES = ("control", "node0", "node1")


def unavailable() -> str | None:
    """Why there can be no such hosts here."""
    if reason := hosts_available():
        return reason
    missing = [tool for tool in ("ssh", "ssh-keygen", SSHD) if shutil.which(tool) is None]
    return f"no {', no '.join(missing)} here: install openssh-server" if missing else None


class SshHosts:
    """A machine to type commands on, and two hosts that it reaches over ssh.

    All see ``folder``, but for ``folder/own``, which is another one on each of them.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.own = folder / "own"
        self.own.mkdir()
        self.hosts = stack.enter_context(
            Hosts(3, names=list(NAMES), private=[self.own], private_memory=True)
        )
        self.control, *self.nodes = self.hosts
        self._sshd: dict[str, subprocess.Popen[Any]] = {}
        self.commands: list[subprocess.Popen[Any]] = []
        for key in ("host", "user", "stranger"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(make, check=True)
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        host_key = (folder / "host.pub").read_text().split()[:2]
        known = [f"[{name}]:{PORT} {' '.join(host_key)}\n" for name in NAMES]
        (folder / "known_hosts").write_text("".join(known))
        self.write_client_config("client.conf", "user")
        self.write_client_config("stranger.conf", "stranger")
        (folder / "sshd.conf").write_text(
            f"Port {PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\n"
            f"SetEnv HOME={self.own} OMP_NUM_THREADS=1\nMaxStartups 100\n"
        )
        for node in self.nodes:
            # Where sshd wants an empty folder; nobody else sees this one.
            node.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
            node.run(["mkdir", "/run/sshd"], check=True)
            self.serve(node)
        stack.callback(self.close)

    def write_client_config(self, name: str, key: str) -> None:
        """ssh's config: where it finds its key, and whom it knows."""
        (self.folder / name).write_text(
            f"Host node0 node1\n  Port {PORT}\n  User root\n  IdentityFile {self.folder}/{key}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n"
        )

    def serve(self, node: Host) -> None:
        """Start a node's sshd."""
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd.conf")]
        log = open(self.folder / f"{node.name}.sshd", "ab")  # noqa: SIM115
        with log:
            served = self._sshd[node.name] = node.popen(command, stdout=log, stderr=log)
        serves_the_session(served.pid)
        wait_for(lambda: self._answers(node), f"sshd of {node.name}")

    def _answers(self, node: Host) -> bool:
        probe = f"import socket; socket.create_connection(('{node.address}', {PORT}), 1).close()"
        return node.run([sys.executable, "-S", "-c", probe], capture_output=True).returncode == 0

    def serve_again(self, node: Host) -> None:
        """Start a node's sshd if it was killed."""
        if node.name not in self._sshd:
            self.serve(node)

    def kill(self, node: Host) -> None:
        """End everything on a node, its sshd included."""
        node.kill()
        self._sshd.pop(node.name).wait()

    def close(self) -> None:
        """End what still runs."""
        for node in self.nodes:
            node.kill()
        for process in self._sshd.values():
            process.wait()

    def processes(self) -> list[int]:
        """What runs on the nodes, other than the sshd that listens."""
        own = {process.pid for process in self._sshd.values()}
        return [pid for node in self.nodes for pid in node.processes() if pid not in own]

    def left(self) -> list[str]:
        """The same, in words; what has just ended is none."""
        return [f"{pid}: {line}" for pid in self.processes() if (line := command_line(pid)) != "?"]

    def left_but_sshd(self) -> list[str]:
        """The same without sshd's processes for connections, which learn late of a dead link."""
        return [line for line in self.left() if "sshd:" not in line]

    def end_what_is_left(self) -> None:
        """Have the next test find nothing."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def command_lines(self) -> list[bytes]:
        """Those of everything on the nodes."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        return found

    def secrets(self) -> list[tuple[int, str]]:
        """The files of secrets that launchers on the nodes have: their modes, and what is in them."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                path = Path(f"/proc/{pid}/root{words[words.index('--secret-file') + 1]}")
                found.append((path.stat().st_mode & 0o777, path.read_text().strip()))
        return found


class SshRun:
    """A ``paceline train --on ssh`` on the control machine."""

    def __init__(
        self,
        there: SshHosts,
        folder: Path,
        *more: str,
        hosts: str = "node0:1,node1:1",
        client: str = "client.conf",
        steps: int = 6,
        slow: float | None = None,
        write: bool = True,
    ) -> None:
        self.there, self.folder = there, folder
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            text = CONFIG.format(steps=steps, node_timeout=6.0).replace("  nproc: 1\n", "")
            (folder / "sums.yaml").write_text(text)
            (folder / "node_sums.py").write_text(MODULE)
            if slow is not None:
                (folder / "slow").write_text(str(slow))
        self.command = [sys.executable, "-m", "paceline", "train", "sums.yaml", "--on", "ssh"]
        self.command += ["--hosts", hosts, "--set", f"launch.ssh.config={there.folder / client}"]
        self.command += more
        self.out = there.folder / f"{folder.name}-{len(there.commands)}.out"
        self.process: subprocess.Popen[Any] | None = None

    def start(self) -> SshRun:
        """Type the command."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(self.there.folder)}
        env["XDG_STATE_HOME"] = str(self.there.folder / "state")
        with open(self.out, "wb") as out:
            self.process = self.there.control.popen(
                self.command, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT, env=env
            )
        self.there.commands.append(self.process)
        return self

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.out.read_text(encoding="utf-8", errors="replace")

    def ends(self, seconds: float = 150) -> int:
        """Its exit status, waited for."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"still runs:\n{self.text}") from None

    def command_of(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another paceline command on the control machine, about this run."""
        env = {**os.environ, "HOME": str(self.there.folder)}
        env["XDG_STATE_HOME"] = str(self.there.folder / "state")
        command = [sys.executable, "-m", "paceline", *words]
        return self.there.control.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True
        )

    def run_folder(self) -> Path:
        """The run's folder, once it is there."""
        found = wait_for(lambda: list((self.folder / "runs").glob("sums-*")), f"a run\n{self.text}")
        return found[0]

    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        return losses_in(self.run_folder() / events.FILE_NAME)

    def reaches(self, step: int) -> None:
        """Wait for a step."""
        try:
            wait_for(lambda: max(self.losses(), default=0) >= step, f"step {step}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None


def losses_in(path: Path) -> dict[int, float]:
    """The loss of each step, of one that was repeated the last."""
    if not path.exists():
        return {}
    return {one.step: one.loss for one in events.read(path) if isinstance(one, StepDone)}


def local_losses(folder: Path, arguments: Sequence[str]) -> dict[int, float]:
    """The losses of the same config on ranks of this machine."""
    run = folder / "runs" / "local"
    command = [sys.executable, "-m", "paceline", "train", "sums.yaml", "--run-dir", str(run)]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_in(run / events.FILE_NAME)
