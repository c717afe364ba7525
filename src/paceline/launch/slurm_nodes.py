"""SLURM's short forms: lists of hosts (``gpu[01-03,7],login``) and counts (``2(x3),1``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from paceline.errors import WorldError

_MOST_HOSTS = 65536
"""SLURM itself allows no more in one list."""
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as SLURM writes it, in its order: ``"gpu[08-10]"`` is three.

    A host may have several groups (``rack[1-2]-node[1-4]``), a group single numbers and ranges
    (``[01-03,7]``); the zeros in front of a range's first number stay.
    """
    hosts: list[str] = []
    for part in _split(text):
        for host in _expand(part, text):
            hosts.append(host)
            if len(hosts) > _MOST_HOSTS:
                raise _no_list(text, f"it has more than {_MOST_HOSTS} hosts")
    if not hosts:
        raise _no_list(text, "it is empty")
    return hosts


def first_host(text: str) -> str:
    """The first host of a list."""
    return expand_hosts(text)[0]


def expand_counts(text: str) -> list[int]:
    """The tasks of each node in ``SLURM_TASKS_PER_NODE``'s form: ``"2(x3),1"`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise WorldError(
                f"{text!r} is no list of tasks per node; SLURM writes them like '2(x3),1'."
            )
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_HOSTS:
            raise WorldError(f"{text!r} has more than {_MOST_HOSTS} nodes.")
        counts += [int(match[1])] * times
    return counts


def _split(text: str) -> list[str]:
    """The parts between the commas that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _no_list(text, "its brackets do not match")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise _no_list(text, "its brackets do not match")
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _expand(part: str, text: str) -> Iterator[str]:
    """One entry of the list, with all its groups: the last one varies fastest."""
    pieces = re.split(r"\[([^\]]*)\]", part)  # text, group, text, group, …, text
    choices = [
        [piece] if number % 2 == 0 else list(_numbers(piece, text))
        for number, piece in enumerate(pieces)
    ]
    return map("".join, itertools.product(*choices))


def _numbers(group: str, text: str) -> Iterator[str]:
    for part in group.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _no_list(text, f"[{group}] holds more than numbers and ranges")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST_HOSTS:
            raise _no_list(text, f"the range {part} does not go upwards, or too far")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _no_list(text: str, why: str) -> WorldError:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return WorldError(f"{shown!r} is no list of hosts: {why}. SLURM's are like 'gpu[01-03,7]'.")
