"""What an error or a log line usually means, and what to do about it: a table.

Rules are tried in order; the first whose pattern is found wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SMALLER = (
    "lower batch.microbatch, set checkpoint_activations=full, or shard more (layout zero=3). "
    "`--set track.memory=true` shows what each rank holds"
)


@dataclass(frozen=True)
class ErrorRule:
    """``pattern`` in an error or a log means ``says``; ``advice`` is the next step."""

    kind: str
    pattern: re.Pattern[str]
    says: str
    advice: str


def _rule(kind: str, pattern: str, says: str, advice: str) -> ErrorRule:
    return ErrorRule(kind, re.compile(pattern, re.MULTILINE), says, advice)


RULES = (
    _rule(
        "disk_full",
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free space where the run writes (df -h), or keep fewer checkpoints (checkpoint.keep), or "
        "put them elsewhere (checkpoint.where); then resume",
    ),
    _rule(
        "gpu_memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU ran out of memory",
        _SMALLER,
    ),
    _rule(
        "loader_worker",
        r"DataLoader worker .*(exited unexpectedly|is killed by signal)",
        "a process that reads data was killed, most often for want of memory",
        "look at `dmesg | grep -i oom` there; lower data.workers, or what a sample needs",
    ),
    _rule(
        "shared_memory",
        r"Bus error|insufficient shared memory|unable to (open|mmap|allocate) shared memory",
        "shared memory (/dev/shm) is full",
        "look at `df -h /dev/shm` there; in a container, give it more (--shm-size), or lower "
        "data.workers",
    ),
    _rule(
        "memory",
        r"can't allocate memory|Cannot allocate memory|^MemoryError|bad_alloc|oom-kill"
        r"|Out of memory: Killed",
        "the machine ran out of memory",
        _SMALLER,
    ),
    _rule(
        "open_files",
        r"Too many open files",
        "the limit on open files was reached",
        "raise it with `ulimit -n` before the start, or lower data.workers",
    ),
    _rule(
        "mismatch",
        r"CollectiveMismatch|op\.preamble\.length|Detected mismatch between collectives"
        r"|[Mm]ismatch(ed)? collective",
        "ranks called different collectives, or with different shapes",
        "look for code that depends on the rank: every rank must make the same calls in the same "
        "order. `paceline verify` on the config may show it in a few steps",
    ),
    _rule(
        "gpu_assert",
        r"device-side assert",
        "an index went out of bounds on the GPU (often a label or token id too large)",
        "check the range of labels and token ids against the model; CUDA_LAUNCH_BLOCKING=1 shows "
        "the line",
    ),
    _rule(
        "gpu_broken",
        r"uncorrectable ECC|GPU has fallen off the bus|Xid",
        "the GPU itself fails",
        "take this machine out of the run (nvidia-smi -q, dmesg | grep Xid) and resume without it",
    ),
    _rule(
        "gpu_illegal",
        r"CUDA error: (an illegal memory access|unspecified launch failure|misaligned)",
        "a GPU kernel read or wrote where it must not",
        "CUDA_LAUNCH_BLOCKING=1 shows the line; a custom kernel is the first suspect",
    ),
    _rule(
        "no_way_back",
        r"nothing older to go on from|CheckpointDamaged",
        "none of the saved states could be loaded",
        "`paceline checkpoint verify RUN` names the damaged files; checkpoint.keep says how many "
        "are there to fall back on",
    ),
    _rule(
        "not_allowed",
        r"Permission denied|Read-only file system|PermissionError",
        "the run may not write or read there",
        "give this user the right to it, or choose another folder (--run-dir, checkpoint.where)",
    ),
    _rule(
        "port_taken",
        r"Address already in use|EADDRINUSE",
        "a port is taken by another program",
        "choose another port (--rdzv HOST:PORT), or end what holds it (ss -ltnp)",
    ),
    _rule(
        "lost_peer",
        r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed"
        r"|gloo/transport|NCCL.*(remote process exited|unhandled system error)",
        "its connection to another rank broke",
        "look at the logs of the other ranks of this start, and at the network between the "
        "machines: `paceline doctor` tries every pair",
    ),
    _rule(
        "timeout",
        r"Watchdog caught collective operation timeout|[Tt]imed out waiting|wait timeout after"
        r"|Timeout at NCCL|TimeoutError",
        "it waited for other ranks until launch.timeout was over",
        "with hangs.after set, the next time the run names the rank that is missing; or raise "
        "launch.timeout if a rank may take that long",
    ),
    _rule(
        "missing_package",
        r"^(\w+\.)*(ModuleNotFoundError|ImportError|MissingExtra)\b",
        "something it needs cannot be imported",
        "install it in the environment of the ranks, on every machine",
    ),
    _rule(
        "mistake",
        r"^(\w+\.)*(ConfigError|LayoutError|DataError|LossError|TrainingError|SyntaxError"
        r"|IndentationError|NameError|AttributeError)\b",
        "",
        "put right what the message says, then start it again",
    ),
)

SIGNALS = {
    "SIGKILL": (
        "memory",
        "Its log gives no reason; probably the machine ran out of memory and the system killed it",
        "look at `dmesg | grep -i -e oom -e killed`{there}; if so, " + _SMALLER,
    ),
    "SIGBUS": (
        "shared_memory",
        "Probably shared memory (/dev/shm) or the disk was full",
        "look at `df -h /dev/shm`{there}; in a container, give it more (--shm-size)",
    ),
    "SIGSEGV": (
        "crash",
        "It crashed in native code",
        "the Python stack at that moment is the first suspect; a custom kernel or a package built "
        "for another torch is the usual cause",
    ),
    "SIGABRT": (
        "crash",
        "Native code gave up",
        "its last lines say why",
    ),
    "SIGILL": (
        "crash",
        "Native code was built for another kind of processor",
        "reinstall the packages on this machine",
    ),
    "SIGTERM": (
        "told_to_end",
        "Something outside of the run told this rank to end",
        "look for who sent SIGTERM{there}: a scheduler, a container that was stopped, a person",
    ),
}
"""By signal: kind, what it means, what to do; ``{there}`` becomes the host."""

HANGS = {
    "code": "read the stack of that rank, below: the line of your own code that it is in",
    "data": "look at the storage that its data is on, at data.workers, and at its stack",
    "reading": "look at what it reads or writes there: a file, a pipe or a socket that gives "
    "nothing",
    "saving": "look at the disk or the store that checkpoints go to (checkpoint.where)",
    "disk": "look at the disk or the network file system of its machine (dmesg, df): the process "
    "waits in the kernel",
    "message": "every send needs a receive on the other side, in the same order",
    "native": "look at the native code in its stack: it does not let go of Python's interpreter",
    "stopped": "let it go on with `kill -CONT` and its process id; a debugger, Ctrl-Z or a frozen "
    "container stops processes",
    "left": "ranks must do the same number of steps and leave together: look at its log",
    "unreachable": "see whether its machine is up, and try the network with `paceline doctor`",
    "mismatch": "every rank must make the same calls with the same shapes in the same order: look "
    "for code that depends on the rank",
    "compiling": "the first steps of a compiled model take long: raise hangs.after, or wait",
    "deadlock": "ranks must enter their groups in the same order: compare their stacks",
    "network": "try the network between the machines with `paceline doctor`",
}
"""By the kind of a hang (``hangs.diagnosis.KINDS``): what to do."""


def rule_for(text: str) -> ErrorRule | None:
    """The rule that fits a text, if one does."""
    return next((rule for rule in RULES if rule.pattern.search(text)), None)


def hang_advice(what: str) -> str:
    """The next step for a kind of hang."""
    return HANGS.get(what, "start with the Python stack of the rank that is missing, below")
