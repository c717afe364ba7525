"""Options of torchrun, accelerate, deepspeed and mpirun, and our command that does the same.

Those in ``SAME`` mean exactly what one of ours does, and are taken for it. The others are answered
with the whole command to use instead.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

SAME = {
    "--nproc-per-node": "--nproc",
    "--nproc_per_node": "--nproc",
    "--num-nodes": "--nnodes",
    "--num_nodes": "--nnodes",
    "--num-machines": "--nnodes",
    "--num_machines": "--nnodes",
    "--rdzv-endpoint": "--rdzv",
    "--rdzv_endpoint": "--rdzv",
    "--max_restarts": "--max-restarts",
}
"""By their name, ours."""

PROCESS_GROUPS = ("gloo", "nccl", "mpi", "ucc", "xccl")
"""What other launchers mean by ``--backend``: torch's process groups; ours names a library."""

_RANKS = ("--num-gpus", "--gpus-per-node", "--gpus", "--devices", "--num-procs", "--nprocs")
_ALL_RANKS = ("--num-processes", "-np", "-n", "--np")
_ADDRESS = ("--master-addr", "--main-process-ip", "--address")
_PORT = ("--master-port", "--main-process-port")
_DROPPED = {
    "--node-rank": "machines number themselves",
    "--machine-rank": "machines number themselves",
    "--rdzv-backend": "there is one rendezvous",
    "--rdzv-id": "a rendezvous is for one run",
    "--rdzv-conf": "see launch.node_timeout and launch.rejoin_timeout",
    "--log-dir": "logs are in the run's folder, see --run-dir",
}
"""With a value, and no need for them here."""
_SWITCHES = {
    "--standalone": "one machine needs no rendezvous",
    "--multi-gpu": "all GPUs are used",
    "--use-env": "ranks have LOCAL_RANK",
}
"""The same without a value."""
_DEFAULT_PORT = "29400"
_PRECISIONS = {
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
}
_SHARDED = {"fsdp": 3, "fsdp2": 3, "deepspeed": 2, "zero": 2}


@dataclass
class Translation:
    """A command line with the options of others replaced, and what was replaced."""

    arguments: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ranks: str | None = None
    machines: str | None = None
    address: str | None = None
    port: str | None = None
    layout: str | None = None
    deepspeed: str | None = None
    """A DeepSpeed config that was named."""

    def answer(self, after: Sequence[str] = ()) -> str:
        """What to say of them; ``after`` is the rest of the command."""
        command = shlex.join(["paceline", "train", *self.arguments, *after])
        notes = f" ({'; '.join(dict.fromkeys(self.notes))})" if self.notes else ""
        return f"{', '.join(self.typed)}: of another launcher; here that is: {command}{notes}"


def with_our_names(args: Sequence[str]) -> list[str]:
    """``args`` with options that mean the same under our names; those of a script stay."""
    end = list(args).index("--") if "--" in args else len(args)
    named = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        named.append(f"{SAME[name]}{equals}{value}" if name in SAME else arg)
    return [*named, *args[end:]]


def names_process_group(args: Sequence[str]) -> bool:
    """Whether ``args`` have another launcher's ``--backend``, like ``--backend nccl``."""
    words = " ".join(args).replace("--backend=", "--backend ").split()
    return any(
        name == "--backend" and value in PROCESS_GROUPS for name, value in itertools.pairwise(words)
    )


def translate(args: Sequence[str]) -> Translation:
    """What ``args``, up to where a script's own begin, are in our options."""
    found = Translation()
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        plain = name if name in ("-H", "-np", "-n") else name.replace("_", "-")
        if plain == "--nnodes":
            found.machines = value or (rest[0] if rest else None)
        if plain in _SWITCHES or plain in ("--cpu", "--use-fsdp", "--use-deepspeed", "--deepspeed"):
            if plain == "--deepspeed":
                taken = not equals and bool(rest) and rest[0].endswith(".json")
                found.deepspeed = (rest.pop(0) if taken else value) or None
                arg = f"{arg} {found.deepspeed}" if taken else arg
            _take_switch(found, plain, arg)
            continue
        given = value if equals else next(iter(rest), "")
        if not _has_value(plain) or (plain == "--backend" and given not in PROCESS_GROUPS):
            found.arguments.append(arg)
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        found.typed.append(f"{name}{equals or ' '}{value}".rstrip())
        _take_value(found, plain, value)
    _put_together(found)
    return found


def _has_value(name: str) -> bool:
    own = ("--backend", "--mixed-precision", "--precision", "--config-file", "--config")
    more = ("--strategy", "--deepspeed-config", "--accelerator", "-H")
    return name in (*_RANKS, *_ALL_RANKS, *_ADDRESS, *_PORT, *_DROPPED, *own, *more)


def _take_switch(found: Translation, name: str, arg: str) -> None:
    found.typed.append(arg)
    if name in _SWITCHES:
        found.notes.append(_SWITCHES[name])
    elif name == "--cpu":
        found.arguments += ["--set", "launch.device=cpu"]
    else:
        found.layout = "zero=3" if name == "--use-fsdp" else "zero=2"


def _take_value(found: Translation, name: str, value: str) -> None:
    if name in _RANKS:
        found.arguments += ["--nproc", value]
    elif name in _ALL_RANKS:
        found.ranks = value
    elif name in _ADDRESS:
        found.address = value
    elif name in _PORT:
        found.port = value
    elif name in _DROPPED:
        found.notes.append(_DROPPED[name])
    elif name in ("--mixed-precision", "--precision"):
        found.arguments += ["--set", f"precision={_PRECISIONS.get(value, value)}"]
    elif name in ("--config-file", "--config"):
        found.arguments.insert(0, value)
    elif name == "--deepspeed-config":
        found.deepspeed = value
    elif name == "-H":
        found.arguments += ["--hosts", value]
    elif name in ("--backend", "--accelerator"):
        _take_device(found, value)
    else:
        found.layout = _layout_of(value)


def _take_device(found: Translation, value: str) -> None:
    if value in ("gloo", "cpu"):
        found.arguments += ["--set", "launch.device=cpu"]
        found.notes.append("on CPUs ranks talk over Gloo")
    elif value in ("nccl", "gpu", "cuda"):
        found.arguments += ["--set", "launch.device=cuda"]
        found.notes.append("on GPUs ranks talk over NCCL")
    else:
        found.notes.append("ranks talk over NCCL on GPUs and over Gloo on CPUs")


def _layout_of(strategy: str) -> str | None:
    """The layout of another framework's strategy: ``ddp`` is what there is without any."""
    word = strategy.lower()
    for stage in ("1", "2", "3"):
        if word.startswith(("deepspeed", "zero")) and word.endswith(stage):
            return f"zero={stage}"
    return next(
        (f"zero={stage}" for name, stage in _SHARDED.items() if word.startswith(name)), None
    )


def _put_together(found: Translation) -> None:
    """What several options of theirs say together."""
    if found.address is not None or found.port is not None:
        host = found.address or "HOST"
        found.arguments += ["--rdzv", f"{host}:{found.port or _DEFAULT_PORT}"]
        if found.machines is None:
            found.arguments += ["--nnodes", "N"]
            found.notes.append("N: how many machines; on a single one leave both out")
    if found.ranks is not None:
        ranks, machines = found.ranks, found.machines or "1"
        if ranks.isdecimal() and machines.isdecimal() and int(machines) > 1:
            found.notes.append("--nproc is by machine")
            ranks = str(-(-int(ranks) // int(machines)))
        found.arguments += ["--nproc", ranks]
    if found.deepspeed is not None and "--script" in found.arguments:
        found.notes.append(
            "in a script: paceline.compat.deepspeed.initialize(..., "
            f"config={found.deepspeed!r}); the script's own arguments stand after --"
        )
    elif found.deepspeed is not None:
        found.arguments += ["--set", f"deepspeed={found.deepspeed}"]
    elif found.layout is not None and "--script" in found.arguments:
        found.notes.append(f"in a script: paceline.Engine(..., layout='{found.layout}')")
    elif found.layout is not None:
        found.arguments += ["--layout", found.layout]
