"""Several hosts on one machine: network namespaces joined by a switch, for tests of many nodes.

    with Hosts(3) as hosts:
        first = hosts[0].popen(["paceline", "train", "--rdzv", f"{hosts[0].address}:29400", ...])
        hosts[2].cut()      # its link is gone; no connection is closed
        hosts[2].heal()

Each host has a network, a name and a table of mounts of its own; names of all hosts resolve on
every host, and nothing outside of them can be reached. Processes, files and clocks are shared with
this machine, except for what is asked to be private. Nothing has a name that could be left behind:
namespaces live as long as this process holds them or something runs in them, and a small
process ends whatever runs in them when this one is gone, however it ended.

Needs Linux, root (``CAP_SYS_ADMIN``) and the commands ``ip`` and ``tc``: see
``hosts_available``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.testing.processes import is_alive, pids

Folder = str | os.PathLike[str]
Command = Sequence[str | os.PathLike[str]]

_NETWORK = "10.99.0"
_DEVICE = "eth0"
_KINDS = {"net": "net", "uts": "uts", "mnt": "mount"}  # /proc's names and nsenter's
_COMMANDS = ("ip", "tc", "unshare", "nsenter", "mount")
_SECONDS_TO_END = 10.0


class HostsUnavailable(PacelineError):
    """This machine cannot have hosts of its own, or not what was asked of them."""


@functools.cache
def hosts_available() -> str | None:
    """``None`` when ``Hosts`` can be used here, else the reason, for a test to skip with."""
    if not sys.platform.startswith("linux"):
        return "hosts are Linux network namespaces; this is not Linux"
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: install iproute2 and util-linux"
    probe = "ip link add near type veth peer name far && ip link add hub type bridge"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", probe], capture_output=True, text=True
    )
    if done.returncode != 0:
        return f"network namespaces need root: {done.stderr.strip()}"
    return None


class Host:
    """One of several hosts; made by ``Hosts``."""

    def __init__(self, name: str, address: str, spaces: _Spaces, port: _Port) -> None:
        self.name = name
        self.address = address
        self._spaces = spaces
        self._port = port

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address!r})"

    def command(self, command: Command, cwd: Folder | None = None) -> list[str]:
        """``command`` as this process has to start it to have it run on this host."""
        return self._spaces.command(command, cwd)

    def popen(self, command: Command, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; ``options`` are those of ``subprocess.Popen``."""
        cwd = options.pop("cwd", None)
        return subprocess.Popen(self.command(command, cwd), **options)

    def run(self, command: Command, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a process on this host; ``options`` are those of ``subprocess.run``."""
        cwd = options.pop("cwd", None)
        return subprocess.run(self.command(command, cwd), **options)

    def cut(self) -> None:
        """Pull the plug of this host's link: no packet passes, and no connection is closed."""
        self._port.unplug()

    def heal(self) -> None:
        """Put the plug back in."""
        self._port.plug()

    def delay(self, milliseconds: float) -> None:
        """Hold every packet to and from this host for so long (0: not at all)."""
        self._port.disturb(delay=milliseconds / 1000)

    def drop(self, percent: float) -> None:
        """Lose this share of the packets to and from this host."""
        self._port.disturb(drop=percent / 100)

    def rate(self, megabits: float | None) -> None:
        """Let no more than so many Mbit/s pass in each direction; ``None``: no limit."""
        self._port.limit(megabits)

    def processes(self) -> list[int]:
        """The processes that run on this host."""
        return self._spaces.processes()

    def kill(self) -> None:
        """SIGKILL everything that runs on this host.

        The kernel then closes their connections, which peers notice at once. For a host that
        loses its power, ``cut`` it first.
        """
        _end(self.processes)


class Hosts(Sequence[Host]):
    """Some hosts on one switch, by default called ``host0``, ``host1`` and so on.

    With ``private_memory`` each has a ``/dev/shm`` of its own, and each folder in ``private``
    (which must exist) is another, empty one on every host, as on machines that share no disk.
    """

    def __init__(
        self,
        count: int,
        *,
        names: Sequence[str] | None = None,
        private_memory: bool = False,
        private: Sequence[Folder] = (),
    ) -> None:
        if reason := hosts_available():
            raise HostsUnavailable(f"No hosts on this machine: {reason}.")
        names = [f"host{i}" for i in range(count)] if names is None else list(names)
        if not 1 <= count <= 250 or len(names) != count or len(set(names)) != count:
            raise ValueError(f"{count} hosts named {names}: give 1 to 250 distinct names.")
        folders = [os.path.abspath(folder) for folder in private]
        private_folders = [*folders, *(["/dev/shm"] if private_memory else [])]
        addresses = {name: f"{_NETWORK}.{i + 1}" for i, name in enumerate(names)}
        self._closing = contextlib.ExitStack()
        self._hosts: list[Host] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._switch = self._closing.enter_context(_Spaces("switch", {}, []))
            self._switch.sh("ip link add switch type bridge && ip link set switch up")
            for number, (name, address) in enumerate(addresses.items()):
                spaces = self._closing.enter_context(_Spaces(name, addresses, private_folders))
                port = _Port(f"port{number}", self._switch, spaces, address)
                self._closing.callback(port.close)
                self._hosts.append(Host(name, address, spaces, port))
            self._reaper = _NamespaceReaper([self._switch, *(host._spaces for host in self._hosts)])
            self._closing.callback(self._reaper.close)
            undo.pop_all()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def close(self) -> None:
        """End everything that runs on the hosts, and the hosts."""
        self._closing.close()


class _Spaces:
    """The namespaces of a host, held by open files; they end with those and with what runs."""

    def __init__(self, name: str, addresses: dict[str, str], private: Sequence[str]) -> None:
        self.name = name
        self._files: dict[str, int] = {}
        # A private folder is a tmpfs; a file for all names takes the place of /etc/hosts.
        setup = ["set -e", "ip link set lo up", f"echo {name} > /proc/sys/kernel/hostname"]
        setup += [f"mount -t tmpfs tmpfs '{folder}'" for folder in private]
        if addresses:
            known = {"localhost": "127.0.0.1", **addresses}
            lines = [f"{address} {host}" for host, address in known.items()]
            # What a socket for both kinds of addresses calls its peer; torch asks for the name.
            lines += [f"::ffff:{address} {host}-mapped" for host, address in known.items()]
            table = "\\n".join([*lines, "::1 ip6-localhost", ""])
            # Written into a tmpfs that only these mounts see, so that no file stays behind.
            setup += [
                "mount -t tmpfs tmpfs /mnt",
                f"printf '{table}' > /mnt/hosts",
                "mount --bind /mnt/hosts /etc/hosts",
                "umount -l /mnt",
            ]
        setup += ["echo ready", "read _"]
        with subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", "\n".join(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as maker:
            assert maker.stdout is not None
            assert maker.stderr is not None
            if maker.stdout.readline() != "ready\n":
                raise HostsUnavailable(f"No host {name!r}: {maker.stderr.read().strip()}.")
            for kind in _KINDS:
                self._files[kind] = os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY)
        self._network = os.fstat(self._files["net"]).st_ino

    def __enter__(self) -> _Spaces:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self.processes)
        for file in self._files.values():
            os.close(file)
        self._files = {}

    @property
    def network(self) -> str:
        """The path of the network namespace, for ``ip``."""
        return f"/proc/{os.getpid()}/fd/{self._files['net']}"

    @property
    def inode(self) -> int:
        """A unique number of the network namespace."""
        return self._network

    def command(self, command: Command, cwd: Folder | None = None) -> list[str]:
        """``command`` inside of the namespaces. The process that is started becomes it."""
        if not self._files:
            raise HostsUnavailable(f"Host {self.name!r} is closed.")
        enter = [
            f"--{option}=/proc/{os.getpid()}/fd/{self._files[kind]}"
            for kind, option in _KINDS.items()
        ]
        # Entering a table of mounts leads to its root: go back by name.
        folder = f"--chdir={os.path.abspath(cwd or os.getcwd())}"
        return ["nsenter", *enter, "--", "env", folder, *(os.fspath(word) for word in command)]

    def sh(self, script: str) -> None:
        """Run a shell command in here; its complaint is the error's."""
        done = subprocess.run(
            self.command(["sh", "-c", script], "/"), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise HostsUnavailable(f"On {self.name}: {script}: {done.stderr.strip()}.")

    def processes(self) -> list[int]:
        """What runs in here."""
        return [pid for pid in sorted(pids()) if _network_of(pid) == self._network]


class _Port:
    """The link between a host and the switch."""

    def __init__(self, name: str, switch: _Spaces, spaces: _Spaces, address: str) -> None:
        self._name = name
        self._switch = switch
        self._spaces = spaces
        self._plugged = True
        self._delay = self._drop = 0.0
        self._wire: subprocess.Popen[str] | None = None
        self._wires = 0
        spaces.sh(
            f"ip link add {_DEVICE} type veth peer name {name} netns {switch.network} && "
            f"ip address add {address}/24 dev {_DEVICE} && ip link set {_DEVICE} up"
        )
        switch.sh(f"ip link set {name} up")
        self.plug()

    def plug(self) -> None:
        """Connect to the switch, or to the wire that leads there."""
        self._plugged = True
        self._switch.sh(f"ip link set {self._name} master {self._next_hop}")

    def unplug(self) -> None:
        """Be connected to nothing. The host's own device stays up, as if a switch had died."""
        self._plugged = False
        self._switch.sh(f"ip link set {self._name} nomaster")

    def limit(self, megabits: float | None) -> None:
        """A token bucket at both ends."""
        for spaces, device in ((self._spaces, _DEVICE), (self._switch, self._name)):
            if megabits is None:
                spaces.sh(f"tc qdisc del dev {device} root 2>/dev/null || true")
            else:
                spaces.sh(
                    f"tc qdisc replace dev {device} root tbf rate {round(megabits * 1e6)}bit "
                    "burst 64kb latency 100ms"
                )

    def disturb(self, delay: float | None = None, drop: float | None = None) -> None:
        """Put a wire with a delay and losses between the host and the switch, or take it out.

        A process of ours, as many kernels come without the ``netem`` that ``tc`` would need.
        """
        self._delay = self._delay if delay is None else delay
        self._drop = self._drop if drop is None else drop
        if self._delay < 0 or not 0 <= self._drop <= 1:
            raise ValueError(f"delay {self._delay} s, loss {self._drop}: no such link.")
        self._end_wire()
        if self._delay or self._drop:
            self._wires += 1
            self._start_wire(f"{self._name}w{self._wires}")
        if self._plugged:
            self.plug()

    def close(self) -> None:
        """End what holds packets back."""
        self._end_wire()

    @property
    def _next_hop(self) -> str:
        return "switch" if self._wire is None else f"{self._name}w{self._wires}"

    def _start_wire(self, bridge: str) -> None:
        near, far = f"{bridge}a", f"{bridge}b"
        program = Path(__file__).with_name("slow_link.py")
        arguments = [near, far, str(self._delay), str(self._drop)]
        self._wire = subprocess.Popen(
            self._switch.command([sys.executable, "-I", "-S", program, *arguments], "/"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._wire.stdout is not None
        assert self._wire.stderr is not None
        if self._wire.stdout.readline() != "ready\n":
            reason = self._wire.stderr.read().strip()
            self._end_wire()
            raise HostsUnavailable(f"No delayed or lossy link on this machine: {reason}.")
        self._switch.sh(
            f"ip link add {bridge} type bridge && ip link set {bridge} up && "
            f"ip link set {near} master {bridge} && ip link set {near} up && "
            f"ip link set {far} master switch && ip link set {far} up"
        )

    def _end_wire(self) -> None:
        if self._wire is None:
            return
        self._wire.kill()
        self._wire.communicate()
        bridge, self._wire = self._next_hop, None
        self._switch.sh(f"ip link del {bridge} 2>/dev/null || true")


class _NamespaceReaper:
    """A process that ends what runs on the hosts when this process is gone, however it ended."""

    def __init__(self, spaces: Sequence[_Spaces]) -> None:
        program = Path(__file__).with_name("namespace_reaper.py")
        networks = [str(space.inode) for space in spaces]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, *networks],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _end(processes: Callable[[], list[int]]) -> None:
    """SIGKILL processes until there are none; those that they start on their way out, too."""
    deadline = time.monotonic() + _SECONDS_TO_END
    while found := [pid for pid in processes() if is_alive(pid)]:
        if time.monotonic() > deadline:
            raise HostsUnavailable(f"Processes {found} do not end after SIGKILL.")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # gone, or a zombie, which is in no network any more
        return None
