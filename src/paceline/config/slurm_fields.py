"""The kinds of value that ``launch.slurm`` holds: each becomes a line of a script, and only that.

A check returns the value or raises ``ValueError`` with the text a person reads.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

_WORD = re.compile(r"[A-Za-z0-9_.,:@/+=][A-Za-z0-9_.,:@/+=-]*")
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.,:&|*()\[\]+-]+")
_N = "[0-9]{1,9}"
_TIME = re.compile(rf"{_N}(:[0-9]{{1,2}}){{0,2}}|{_N}-[0-9]{{1,2}}(:[0-9]{{1,2}}){{0,2}}")
_MEMORY = re.compile(r"[0-9]{1,12}[KMGTkmgt]?")
_RANGE = re.compile(rf"({_N})(?:-({_N})(?::({_N}))?)?")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:[= ].*)?")
_MOST_INDICES = 100_000

OURS = {
    "nodes": "launch.nnodes",
    "ntasks": "launch.nproc",
    "ntasks-per-node": "launch.nproc",
    "cpus-per-task": "launch.slurm.cpus_per_node",
    "gpus-per-node": "launch.slurm.gpus_per_node",
    "gres": "launch.slurm.gres",
    "mem": "launch.slurm.memory",
    "time": "launch.slurm.time",
    "partition": "launch.slurm.partition",
    "account": "launch.slurm.account",
    "qos": "launch.slurm.qos",
    "reservation": "launch.slurm.reservation",
    "constraint": "launch.slurm.constraint",
    "exclusive": "launch.slurm.exclusive",
    "job-name": "launch.slurm.job_name",
    "comment": "launch.slurm.comment",
    "array": "launch.slurm.array",
    "requeue": "launch.slurm.requeue",
    "no-requeue": "launch.slurm.requeue",
    "signal": "launch.slurm.save_before",
    "chdir": "the folder in which the command is typed",
    "output": "the run's folder, --run-dir",
    "error": "the run's folder, --run-dir",
    "open-mode": "the run's folder, --run-dir",
    "wrap": "the config",
    "parsable": "nothing: it is always there",
    "test-only": "--dry-run",
    "wait": "paceline runs logs --follow",
}
"""Options of sbatch that are not for ``extra``, and what says the same."""


def one_line(value: str) -> str:
    """Refuse what could be a second line, or what a script cannot hold."""
    if not value.strip():
        raise ValueError("is empty")
    if not value.isprintable():
        raise ValueError(f"{value!r} holds a line break or another control character; use one line")
    return value


def _word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError(
            f"{value!r} cannot be a name in SLURM; use letters, digits and any of _ . , : @ / + = -"
        )
    return value


def _constraint(value: str) -> str:
    if not _CONSTRAINT.fullmatch(value):
        raise ValueError(
            f"{value!r} is no constraint; use names of features with & | * , ( ) [ ] between them, "
            "without spaces"
        )
    return value


def _time(value: str) -> str:
    if not _TIME.fullmatch(value):
        raise ValueError(
            f"{value!r} is no time limit; use minutes (90), hours:minutes:seconds ('36:00:00') or "
            "days-hours:minutes:seconds ('1-12:00:00')"
        )
    if seconds_of(value) == 0:
        raise ValueError(f"{value!r} is no time at all; leave it out for the partition's")
    return value


def seconds_of(time: str) -> int:
    """The seconds of a time limit as SLURM reads it."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = [0, *parts][-3:]
    return (hours * 60 + minutes) * 60 + seconds


def _memory(value: str) -> str:
    if not _MEMORY.fullmatch(value):
        raise ValueError(f"{value!r} is no size of memory; use a number with K, M, G or T: '64G'")
    return value


def indices_of(array: str) -> list[int]:
    """The numbers of ``0-3,8`` or ``0-9:2%4``, in order."""
    numbers: set[int] = set()
    text, percent, most = array.partition("%")
    if percent and not (most.isascii() and most.isdigit() and int(most)):
        raise ValueError(f"{array!r}: after % comes how many run at a time, 1 or more")
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{array!r} is no list of numbers like '0-3', '1,5,7' or '0-9%2'")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            raise ValueError(f"{array!r}: {part} does not go upwards")
        if (last - first) // step >= _MOST_INDICES:
            raise ValueError(f"{array!r} has more than {_MOST_INDICES:,} numbers")
        numbers |= set(range(first, last + 1, step))
    return sorted(numbers)


def _array(value: str) -> str:
    indices_of(value)
    return value


def _option(value: str) -> str:
    text = value.removeprefix("#SBATCH").strip()
    found = _OPTION.fullmatch(one_line(text))
    if found is None:
        raise ValueError(f"{value!r} is no option of sbatch; write one like '--mail-type=END'")
    if (place := OURS.get(found[1])) is not None:
        raise ValueError(f"--{found[1]} is not for extra; it is set by {place}")
    return text


def _setup_line(value: str) -> str:
    if one_line(value).lstrip().startswith("#SBATCH"):
        raise ValueError(f"{value!r}: options of sbatch go into launch.slurm.extra")
    return value


def _number_as_text(value: Any) -> Any:
    """YAML takes 90 for a number, where minutes, megabytes or an index are meant."""
    return str(value) if type(value) is int else value


_Text = Annotated[str, BeforeValidator(_number_as_text)]
OneLine = Annotated[str, AfterValidator(one_line)]
SetupLine = Annotated[str, AfterValidator(_setup_line)]
SlurmWord = Annotated[str, AfterValidator(_word)]
SlurmConstraint = Annotated[str, AfterValidator(_constraint)]
SlurmTime = Annotated[_Text, AfterValidator(_time)]
SlurmMemory = Annotated[_Text, AfterValidator(_memory)]
SlurmArray = Annotated[_Text, AfterValidator(_array)]
SlurmOption = Annotated[str, AfterValidator(_option)]
