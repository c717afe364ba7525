"""What ``bench comm`` is asked to measure: checked before a rank is started. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.collectives import COLLECTIVES
from paceline.errors import ConfigError
from paceline.formatting import one_of

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
LONGEST = 10
"""A single call may take this many times ``--seconds``; what would take longer is left out."""
GROUPS: dict[str, str] = {
    "all": "all ranks",
    "within": "the ranks of each machine, all machines at once",
    "across": "one rank of each machine",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_POWER = {"": 0, "K": 10, "M": 20, "G": 30}


@dataclass(frozen=True)
class CommRequest:
    """What to measure. ``groups`` is empty for those that make a difference."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "auto"
    seconds: float = 0.3
    pairs: bool = True

    def to_json(self) -> str:
        """The request as text."""
        return json.dumps(dataclasses.asdict(self))

    def asked(self) -> dict[str, str]:
        """By option, in a form to compare with what other machines were asked."""
        values = {
            "--collectives": ",".join(self.collectives),
            "--sizes": ",".join(map(str, self.sizes)),
            "--group": ",".join(self.groups),
            "--dtype": self.dtype,
            "--device": self.device,
            "--seconds": f"{self.seconds:g}",
            "--pairs": str(self.pairs),
        }
        return {f"paceline bench comm {option}": value for option, value in values.items()}

    @staticmethod
    def from_json(text: str) -> CommRequest:
        """A request from its text."""
        data = json.loads(text)
        for name in ("collectives", "sizes", "groups"):
            data[name] = tuple(data[name])
        return CommRequest(**data)


def read_request(
    *,
    collectives: str,
    sizes: str,
    groups: str,
    dtype: str,
    device: str,
    seconds: float,
    pairs: bool,
) -> CommRequest:
    """A request from the words of a command line; raises ConfigError with all its problems."""
    problems: list[str] = []
    names = _names("--collectives", collectives, list(COLLECTIVES), problems)
    if not _words(collectives):
        problems.append(
            f"--collectives {collectives!r} names none: give some of {', '.join(COLLECTIVES)}, "
            "with commas between them"
        )
    kinds = _names("--group", groups, list(GROUPS), problems)
    _names("--dtype", dtype, list(DTYPES), problems, one=True)
    _names("--device", device, ["auto", "cpu", "cuda"], problems, one=True)
    found = set()
    for word in _words(sizes):
        try:
            found.add(parse_size(word))
        except ValueError as error:
            problems.append(f"--sizes: {error}")
    if not _words(sizes):
        problems.append(f"--sizes {sizes!r} names none: give some, like --sizes 1K,1M,64M")
    if not seconds > 0 or seconds == float("inf"):
        problems.append(f"--seconds {seconds:g}: must be a number of seconds above 0, like 0.3")
    if problems:
        raise ConfigError(problems)
    return CommRequest(
        tuple(names), tuple(sorted(found)), tuple(kinds), dtype, device, seconds, pairs
    )


def parse_size(text: str) -> int:
    """``64K``, ``1.5M`` or ``4096`` as bytes; a K is 1,024. Raises ``ValueError`` for others."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or K, M or G of them, like 64K")
    size = float(match[1]) * 2 ** _POWER[match[2].upper()]
    if size < 1 or size != int(size):
        raise ValueError(f"{text!r} is {size:g} bytes; a size is a whole number of them above 0")
    return int(size)


def place_problems(request: CommRequest, nproc: int, nnodes: int) -> list[str]:
    """Groups that there are none of, with so many ranks on so many machines."""
    problems = []
    if "across" in request.groups and nnodes == 1:
        problems.append(
            "--group across: that is one rank of each machine, but there is one machine; leave it "
            "out, or give --nnodes and --rdzv"
        )
    if "within" in request.groups and nproc == 1:
        problems.append(
            "--group within: those are the ranks of a machine, but each has one; leave it out, or "
            "give --nproc 2 or more"
        )
    return problems


def groups_of(
    nodes: Sequence[Sequence[int]], wanted: Sequence[str] = ()
) -> dict[str, list[list[int]]]:
    """The groups to measure, by kind; ``nodes`` are the ranks of each machine.

    Without ``wanted``, those that differ from all ranks; of ``wanted``, those that there can be.
    """
    everyone = sorted(rank for ranks in nodes for rank in ranks)
    kinds = {
        "all": [everyone],
        "within": [list(ranks) for ranks in nodes if len(ranks) > 1],
        "across": [[min(ranks) for ranks in nodes]],
    }
    possible = {kind: groups for kind, groups in kinds.items() if groups and len(groups[0]) > 1}
    if wanted:
        return {kind: groups for kind, groups in possible.items() if kind in wanted}
    return {k: groups for k, groups in possible.items() if k == "all" or groups != [everyone]}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _names(
    option: str, text: str, known: list[str], problems: list[str], *, one: bool = False
) -> list[str]:
    """The words of ``text`` in the order of ``known``; notes those that are not known."""
    words = [text] if one else _words(text)
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{option} {word}: must be {one_of(known)}{hint}")
    return [name for name in known if name in words]
