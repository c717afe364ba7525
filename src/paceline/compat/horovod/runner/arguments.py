"""The arguments of ``horovodrun``, each of them, as those of ``paceline train``."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_LOCAL = ("localhost", "127.0.0.1")


@dataclass
class HorovodrunCommand:
    """What a command line of ``horovodrun`` is here."""

    arguments: list[str] = field(default_factory=list)
    """Those of ``paceline train``."""
    typed: list[str] = field(default_factory=list)
    """The options that were read, as they were typed."""
    notes: list[str] = field(default_factory=list)
    """What is to know of options that need no counterpart."""
    refused: list[str] = field(default_factory=list)
    """Options without a counterpart, each with what to do instead."""
    script: list[str] = field(default_factory=list)
    """The script and its own arguments."""
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    engine: str | None = None
    slots: str | None = None
    least: str | None = None
    most: str | None = None
    ssh_options: list[str] = field(default_factory=list)

    def answer(self) -> str:
        """What to say to somebody who types it after ``paceline train``."""
        if self.refused:
            return "\n".join(self.refused)
        script, *own = self.script
        ours = ["train", *self.arguments, "--script", script, *(["--", *own] if own else [])]
        notes = f" ({'; '.join(dict.fromkeys(self.notes))})" if self.notes else ""
        typed = ", ".join(self.typed)
        return f"{typed}: of horovodrun; here that is: {shlex.join(['paceline', *ours])}{notes}"

    def set(self, key: str, value: str) -> None:
        """Add ``--set key=value``."""
        self.arguments += ["--set", f"{key}={value}"]

    def variable(self, name: str, value: str) -> None:
        """Give the ranks a variable."""
        self.set(f"launch.env.{name}", json.dumps(value))


_Take = Callable[[HorovodrunCommand, str], None]


def _keep(name: str) -> _Take:
    def take(command: HorovodrunCommand, value: str) -> None:
        setattr(command, name, value)

    return take


def _variable(name: str) -> _Take:
    return lambda command, value: command.variable(name, value)


def _number(name: str, factor: int = 1) -> _Take:
    def take(command: HorovodrunCommand, value: str) -> None:
        try:
            number = float(value) * factor
        except ValueError:
            number = math.nan
        if 0 <= number < math.inf:
            command.variable(name, f"{int(number) if number.is_integer() else number}")
        else:
            command.refused.append(f"{command.typed[-1]}: must be a number, 0 or more")

    return take


def _flag(name: str) -> _Take:
    return lambda command, value: command.variable(name, "1")


def _note(text: str) -> _Take:
    return lambda command, value: command.notes.append(text)


def _refuse(text: str) -> _Take:
    return lambda command, value: command.refused.append(f"{command.typed[-1]}: {text}")


def _ours(flag: str) -> _Take:
    def take(command: HorovodrunCommand, value: str) -> None:
        command.arguments += [flag, value]

    return take


def _ranks(command: HorovodrunCommand, value: str) -> None:
    if value.isdecimal() and int(value) > 0:
        command.ranks = int(value)
    else:
        command.refused.append(f"-np {value}: must be a whole number, 1 or more")


def _interface(command: HorovodrunCommand, value: str) -> None:
    command.variable("GLOO_SOCKET_IFNAME", value)
    command.variable("NCCL_SOCKET_IFNAME", value)


def _mpi_args(command: HorovodrunCommand, value: str) -> None:
    command.engine = "mpi"
    command.set("launch.mpi.args", json.dumps(value.split()))


_TUNED = "nothing is tuned while it runs; measure with paceline bench wire"
_TIMES = "every line of a rank's log is in the order in which it was written"
_FORMS = "paceline.Reduction(hierarchy=...) chooses the form of reductions of paceline's own engine"
_MPI = "ranks talk over NCCL on GPUs and over Gloo on CPUs"

WITH_VALUE: dict[str, _Take] = {
    "-np": _ranks,
    "--num-proc": _ranks,
    "-H": _keep("hosts"),
    "--hosts": _keep("hosts"),
    "-hostfile": _keep("hostfile"),
    "--hostfile": _keep("hostfile"),
    "--host-discovery-script": _refuse(
        "machines that come start the command themselves, the same on each: paceline train "
        "--nnodes LEAST:MOST --rdzv HOST:PORT --script ..."
    ),
    "--min-np": _keep("least"),
    "--min-num-proc": _keep("least"),
    "--max-np": _keep("most"),
    "--max-num-proc": _keep("most"),
    "--slots-per-host": _keep("slots"),
    "--slots": _keep("slots"),
    "--reset-limit": _ours("--max-restarts"),
    "--elastic-timeout": lambda command, value: command.set("launch.rejoin_timeout", value),
    "--blacklist-cooldown-range": _note("a machine that failed may come back at once"),
    "--start-timeout": _note("a launcher waits for the others until it is stopped"),
    "--network-interface": _interface,
    "--network-interfaces": _interface,
    "--output-filename": _ours("--run-dir"),
    "--config-file": _refuse("give what is set in it as options of their own"),
    "-p": lambda command, value: command.ssh_options.append(f"Port={value}"),
    "--ssh-port": lambda command, value: command.ssh_options.append(f"Port={value}"),
    "-i": lambda command, value: command.ssh_options.append(f"IdentityFile={value}"),
    "--ssh-identity-file": lambda c, value: c.ssh_options.append(f"IdentityFile={value}"),
    "--fusion-threshold-mb": _number("HOROVOD_FUSION_THRESHOLD", 1 << 20),
    "--cycle-time-ms": _number("HOROVOD_CYCLE_TIME"),
    "--cache-capacity": _note("there is no cache of names to size"),
    "--autotune-log-file": _note(_TUNED),
    "--autotune-warmup-samples": _note(_TUNED),
    "--autotune-steps-per-sample": _note(_TUNED),
    "--autotune-bayes-opt-max-samples": _note(_TUNED),
    "--autotune-gaussian-process-noise": _note(_TUNED),
    "--timeline-filename": _variable("HOROVOD_TIMELINE"),
    "--stall-check-warning-time-seconds": _number("HOROVOD_STALL_CHECK_TIME_SECONDS"),
    "--stall-check-shutdown-time-seconds": _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    "--mpi-args": _mpi_args,
    "--binding-args": _note("bind processes with --on mpi and launch.mpi.args"),
    "--num-nccl-streams": _note("NCCL chooses its streams; see NCCL_MAX_NCHANNELS"),
    "--thread-affinity": _note("bind processes with --on mpi and launch.mpi.args"),
    "--gloo-timeout-seconds": _note("a rank that is lost is noticed by the launcher, at once"),
    "--log-level": _note("what ranks write is in their logs, all of it"),
}
"""By name, what becomes of an option and its value."""

SWITCHES: dict[str, _Take] = {
    "--gloo": _note(_MPI),
    "--mpi": _keep("engine"),
    "--jsrun": _refuse("start it with --on mpi, or --on slurm"),
    "--tcp": _note("turn other transports off with NCCL_IB_DISABLE=1"),
    "--verbose": _note("paceline doctor checks the machines and says what it finds"),
    "--disable-cache": _note("nothing that was checked is remembered"),
    "-v": _refuse("paceline --version"),
    "--version": _refuse("paceline --version"),
    "-cb": _refuse("paceline doctor says what this machine has"),
    "--check-build": _refuse("paceline doctor says what this machine has"),
    "--hierarchical-allreduce": _note(_FORMS),
    "--no-hierarchical-allreduce": _note(_FORMS),
    "--hierarchical-allgather": _note(_FORMS),
    "--no-hierarchical-allgather": _note(_FORMS),
    "--torus-allreduce": _note(_FORMS),
    "--no-torus-allreduce": _note(_FORMS),
    "--autotune": _note(_TUNED),
    "--no-autotune": _note(_TUNED),
    "--timeline-mark-cycles": _flag("HOROVOD_TIMELINE_MARK_CYCLES"),
    "--no-timeline-mark-cycles": _note("cycles are not marked unless asked for"),
    "--no-stall-check": _flag("HOROVOD_STALL_CHECK_DISABLE"),
    "--stall-check": _note("stalls are reported unless that is turned off"),
    "--mpi-threads-disable": _note(_MPI),
    "--no-mpi-threads-disable": _note(_MPI),
    "--log-with-timestamp": _note(_TIMES),
    "--log-without-timestamp": _note(_TIMES),
    "--log-hide-timestamp": _note(_TIMES),
    "--no-log-hide-timestamp": _note(_TIMES),
    "-prefix-timestamp": _note(_TIMES),
    "--prefix-output-with-timestamp": _note(_TIMES),
}
"""The same for options without a value."""


_SHARED = (
    "-np",
    "-H",
    "--hosts",
    "-hostfile",
    "--hostfile",
    "--config-file",
    "--verbose",
    "--version",
    "-v",
    "-p",
)
"""Options that other launchers, or ours, have as well: they say nothing of who is meant."""
_CONFIGS = (".yaml", ".yml", ".json")


def is_horovodrun(args: Sequence[str]) -> bool:
    """Whether ``args`` are those of ``horovodrun`` and of no other launcher.

    One option that only it has decides. Without any, they are its own where all of them could be
    and a ``python`` follows, as nobody types it after another launcher's options.
    """
    names, command = _options_and_command(args)
    if command.endswith(_CONFIGS):  # paceline train config.yaml
        return False
    known = [name for name in names if name in WITH_VALUE or name in SWITCHES]
    if any(name not in _SHARED for name in known):
        return True
    return bool(names) and known == names and _is_python(command)


def _options_and_command(args: Sequence[str]) -> tuple[list[str], str]:
    """The names of the options in front of a command, and its first word."""
    names, rest = [], list(args)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, _ = rest.pop(0).partition("=")
        names.append(name)
        has_value = name in WITH_VALUE or (name not in SWITCHES and not _is_command(rest[:1]))
        if has_value and not equals:
            del rest[:1]
    return names, rest[0] if rest else ""


def _is_command(words: Sequence[str]) -> bool:
    """Whether they begin with what cannot be the value of an option that is not known."""
    return any(word[:1] == "-" or word.endswith(".py") or _is_python(word) for word in words)


def _is_python(word: str) -> bool:
    return os.path.basename(word).startswith("python")


def read_horovodrun(args: Sequence[str]) -> HorovodrunCommand:
    """What follows ``horovodrun`` on a command line, in our words."""
    command, rest = HorovodrunCommand(), list(args)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name in SWITCHES:
            command.typed.append(name)
            SWITCHES[name](command, "mpi")
        elif name in WITH_VALUE:
            if not equals:
                value = rest.pop(0) if rest else ""
            if not value:
                command.refused.append(f"{name}: needs a value")
                continue
            command.typed.append(f"{name} {value}")
            WITH_VALUE[name](command, value)
            if name == "--blacklist-cooldown-range" and rest:
                command.typed[-1] += f" {rest.pop(0)}"
        else:
            command.refused.append(f"{word}: no option of horovodrun")
    _take_script(command, rest)
    _take_machines(command)
    command.arguments = ["--backend", "horovod", *command.arguments]
    return command


def _take_script(command: HorovodrunCommand, words: list[str]) -> None:
    """``python train.py --lr 1``, or ``./train.py --lr 1``."""
    if words and _is_python(words[0]):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words = words[1:]
    if not words:
        command.refused.append("no script: name it at the end, as in python train.py")
    elif words[0] == "-m":
        command.refused.append(
            f"python -m {' '.join(words[1:2])}: name the file of the module with --script"
        )
    elif not words[0].endswith(".py") and not os.path.exists(words[0]):
        command.refused.append(
            f"{words[0]}: no file; ranks run a Python script, as in python train.py"
        )
    else:
        command.script = words


def _take_machines(command: HorovodrunCommand) -> None:
    """How many ranks there are, and where, by all options that say something of it."""
    if command.ssh_options:
        command.set("launch.ssh.options", json.dumps(command.ssh_options))
    if command.least is not None or command.most is not None:
        command.notes.append(
            "machines come and go as a whole: where they do, start the command on each of them "
            "with --nnodes LEAST:MOST --rdzv HOST:PORT"
        )
        if "--max-restarts" not in command.arguments:
            command.arguments += ["--max-restarts", "3"]
    hosts = None if command.hosts is None else _hosts(command)
    if hosts is None and command.hostfile is None:
        here = _slots(command)
        hosts = [] if here is None else [("localhost", here)]
    if hosts is not None and all(name in _LOCAL for name, _ in hosts):
        slots = sum(count for _, count in _used(hosts, command)) if hosts else command.ranks
        command.arguments += [] if slots is None else ["--nproc", str(slots)]
        if command.engine == "mpi":
            command.arguments += ["--on", "mpi"]
        return
    command.arguments += ["--on", command.engine or "ssh"]
    if hosts is None:
        command.arguments += ["--hostfile", str(command.hostfile)]
        if command.ranks is not None:
            command.notes.append(f"the file's slots must be {command.ranks} together")
        return
    used = _used(hosts, command)
    command.arguments += ["--hosts", ",".join(f"{name}:{slots}" for name, slots in used)]


def _slots(command: HorovodrunCommand) -> int | None:
    """``--slots-per-host``: how many ranks this machine takes, where no hosts are named."""
    if command.slots is None:
        return None
    if command.slots.isdecimal() and int(command.slots) > 0:
        return int(command.slots)
    command.refused.append(f"--slots-per-host {command.slots}: must be a whole number, 1 or more")
    return None


def _hosts(command: HorovodrunCommand) -> list[tuple[str, int]]:
    """The hosts of ``-H``, with their slots; one slot where none are named."""
    found = []
    for host in str(command.hosts).split(","):
        name, colon, slots = host.strip().partition(":")
        if not name or (colon and not (slots.isdecimal() and int(slots) > 0)):
            command.refused.append(
                f"-H {command.hosts}: {host!r} must be NAME:SLOTS, such as localhost:2"
            )
            return []
        found.append((name, int(slots) if colon else 1))
    return found


def _used(hosts: list[tuple[str, int]], command: HorovodrunCommand) -> list[tuple[str, int]]:
    """The hosts that ``-np`` ranks fill, one after the other, as horovodrun fills them."""
    slots = sum(count for _, count in hosts)
    left = slots if command.ranks is None else command.ranks
    if left > slots:
        command.refused.append(f"-np {left}: the hosts have {slots} slots together; name more")
    used = []
    for name, count in hosts:
        if left > 0:
            used.append((name, min(count, left)))
            left -= count
    return used
