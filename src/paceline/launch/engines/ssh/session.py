"""A connection to one host: the user's own ssh, with ``remote.py`` at its other end."""

from __future__ import annotations

import collections
import contextlib
import importlib.resources
import json
import os
import queue
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from paceline.config.launch_engines import Ssh
from paceline.errors import ConfigError, LaunchError, PacelineError
from paceline.launch.engines.ssh.remote import BOOT
from paceline.launch.hosts import HostSlots
from paceline.untrusted import printable

_ALIVE_SECONDS = 5
_ALIVE_COUNT = 4
_LONGEST_LINE = 1 << 20
_PATH = re.compile(r"(~/|/)?[A-Za-z0-9_.][A-Za-z0-9_./+@=,:-]*")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*\s*[=\s]\s*\S.*")


class ConnectionLost(PacelineError):
    """There is no connection to a host, or no longer; the reason in ssh's words."""


class HostRefused(ConnectionLost):
    """A host answered that something cannot be done there."""


def option_problems(ssh: Ssh) -> list[str]:
    """What is wrong with the settings that end up on ssh's command line."""
    problems = [
        f"launch.ssh.options: {option!r} is no option of ssh; write it as in ssh's config file, "
        "like 'IdentityFile=~/.ssh/cluster'"
        for option in ssh.options
        if not option.isprintable() or not _OPTION.fullmatch(option)
    ]
    if ssh.python is not None and not is_plain_path(ssh.python):
        problems.append(
            f"launch.ssh.python={ssh.python!r} stands in a shell's command line: use letters, "
            "digits and any of / . _ - + @ = , : or make a link to it that has such a name"
        )
    if ssh.config is not None and "\0" in ssh.config:
        problems.append(f"launch.ssh.config={ssh.config!r} cannot be a path")
    return problems


def is_plain_path(path: str) -> bool:
    """Whether a shell takes this word as it is, whichever shell it is."""
    return _PATH.fullmatch(path) is not None


def ssh_options(ssh: Ssh, *, ask: bool = False) -> list[str]:
    """ssh and its options. The user's come first: ssh takes the first value that it is given.

    ``ask`` lets it ask for a password.
    """
    config = [] if ssh.config is None else ["-F", os.path.expanduser(ssh.config)]
    given = [word for option in ssh.options for word in ("-o", option)]
    ours = {
        "BatchMode": "no" if ask else "yes",  # where nobody is there to answer
        "ConnectTimeout": ssh.connect_timeout,
        "ServerAliveInterval": _ALIVE_SECONDS,  # so that a dead link is noticed
        "ServerAliveCountMax": _ALIVE_COUNT,
        "ClearAllForwardings": "yes",  # a port of the user's is taken by his first connection
        "RemoteCommand": "none",
        "PermitLocalCommand": "no",
        "EscapeChar": "none",
    }
    return ["ssh", "-T", *config, *given, *(w for k, v in ours.items() for w in ("-o", f"{k}={v}"))]


def destination(host: HostSlots) -> list[str]:
    """The host, as the last words before the command."""
    user = [] if host.user is None else ["-l", host.user]
    port = [] if host.port is None else ["-p", str(host.port)]
    return [*user, *port, "--", host.name]


def ssh_command(ssh: Ssh, host: HostSlots, through: str | None = None) -> list[str]:
    """The whole command that connects to a host and starts Python there.

    No value of the user's is in what the host's shell reads, but for a path that was checked.
    ``through`` is the socket of an open connection to the host.
    """
    shared = [] if through is None else ["-S", through]
    return [*ssh_options(ssh), *shared, *destination(host), remote_command(ssh)]


@contextlib.contextmanager
def opened_by_hand(ssh: Ssh, hosts: Sequence[HostSlots]) -> Iterator[list[str | None]]:
    """Connections to all hosts, for which ssh may ask for passwords; their sockets.

    They close by themselves when nobody has used them for a minute.
    """
    if not ssh.interactive:
        yield [None] * len(hosts)
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        sockets: list[str | None] = [f"{folder}/{number}" for number in range(len(hosts))]
        try:
            for host, path in zip(hosts, sockets, strict=True):
                options = ["-M", "-S", str(path), "-o", "ControlPersist=60", "-f", "-N"]
                command = [*ssh_options(ssh, ask=True), *options, *destination(host)]
                if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
                    raise LaunchError(f"{host}: no connection over ssh; nothing was started")
            yield sockets
        finally:
            for host, path in zip(hosts, sockets, strict=True):
                close = [*ssh_options(ssh), "-S", str(path), "-O", "exit", *destination(host)]
                subprocess.run(close, capture_output=True)


def remote_command(ssh: Ssh) -> str:
    """For whatever login shell there is: one command in single quotes, without quotes in it."""
    wanted = ssh.python or (sys.executable if is_plain_path(sys.executable) else "python3")
    other = "" if ssh.python else "command -v $p >/dev/null 2>&1 || p=python3; "
    return f"exec sh -c 'p={wanted}; {other}exec $p -c \"{BOOT}\"'"


def host_name(ssh: Ssh, host: HostSlots) -> str:
    """The host's name as ssh's config has it: ``HostName``, else the name itself."""
    command = [*ssh_options(ssh), "-G", *destination(host)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return host.name
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return host.name if found is None else found[1]


class RemoteSession:
    """Requests to a host and its answers; output of a launcher goes to ``on_output``."""

    def __init__(
        self,
        command: list[str],
        on_output: Callable[[str, int], None] = lambda text, offset: None,
    ) -> None:
        self._on_output = on_output
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._said: collections.deque[str] = collections.deque(maxlen=12)
        self._sending = threading.Lock()
        self._token = secrets.token_hex(8)
        self.heard_at = time.monotonic()
        program = importlib.resources.files(__package__).joinpath("remote.py").read_bytes()
        try:
            # A session of its own: a Ctrl-C in the terminal is for us, and ends no connection.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ConfigError(
                "there is no ssh on this machine; install OpenSSH's client (openssh-client)"
            ) from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._threads = [
            threading.Thread(target=work, args=(stream,), daemon=True)
            for work, stream in (
                (self._read, self._process.stdout),
                (self._read_errors, self._process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()
        start = json.dumps({"token": self._token}).encode() + b"\n"
        with contextlib.suppress(ConnectionLost):  # said to whoever asks first
            self._send(b"%d\n" % len(program) + program + start)

    def redirect(self, on_output: Callable[[str, int], None]) -> None:
        """Hand a launcher's output, and how far it has come, to somebody else."""
        self._on_output = on_output

    def ask(
        self, request: Mapping[str, Any], payload: IO[bytes] | None = None, seconds: float = 60
    ) -> dict[str, Any]:
        """The answer to a request; ``ConnectionLost`` where there is none."""
        self.tell(request, payload)
        return self.answer(seconds)

    def tell(self, request: Mapping[str, Any], payload: IO[bytes] | None = None) -> None:
        """Send a request."""
        self._send(json.dumps(request).encode() + b"\n", payload)

    def answer(self, seconds: float | None = None) -> dict[str, Any]:
        """The next answer."""
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise ConnectionLost(f"no answer within {seconds:g} s") from None
        if found is None:
            self._answers.put(None)
            raise ConnectionLost(self.why())
        if "error" in found:
            raise HostRefused(str(found["error"]))
        return found

    def why(self) -> str:
        """What ssh, or the host's shell, said at last."""
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "the connection was closed"
        self._threads[1].join(5)
        lines = [line for line in self._said if line.strip()]
        said = "; ".join(lines[-3:])
        if status == 127 or "not found" in said:
            return f"no Python was found there ({said}); set launch.ssh.python to its path"
        return said or f"ssh left with status {status}"

    def close(self) -> None:
        """End the connection; nothing that it started ends with it at once."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                assert stream is not None
                stream.close()

    def _send(self, data: bytes, payload: IO[bytes] | None = None) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            with self._sending:
                stream.write(data)
                while payload is not None and (chunk := payload.read(1 << 16)):
                    stream.write(chunk)
                stream.flush()
        except (OSError, ValueError):
            raise ConnectionLost(self.why()) from None

    def _read(self, stream: IO[bytes]) -> None:
        """In a thread: what comes from the host. Lines without the token are the shell's."""
        begin = self._token.encode() + b" "
        try:
            while line := stream.readline(_LONGEST_LINE):
                if not line.startswith(begin):
                    self._said.append(_text(line))
                    continue
                answer = json.loads(line[len(begin) :])
                self.heard_at = time.monotonic()
                if "bytes" in answer:
                    answer["data"] = stream.read(int(answer["bytes"]))
                if "output" in answer:
                    self._on_output(str(answer["output"]), int(answer["offset"]))
                elif "alive" not in answer:
                    self._answers.put(answer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._said.append(f"the host sent what is no answer: {error}")
        finally:
            self._answers.put(None)

    def _read_errors(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline(_LONGEST_LINE):
                self._said.append(_text(line))


def _text(line: bytes) -> str:
    return printable(line.decode("utf-8", "replace").strip(), one_line=True)
