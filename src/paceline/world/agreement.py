"""Ranks agree on a collective before its data moves.

Left alone, Gloo answers two ranks that disagree with a C++ ``terminate``, a hang or garbage. So
each rank first sends the others what it is about to do, as a fingerprint of a few bytes. When the
fingerprints differ, the ranks exchange the calls in words and every one of them raises.

A call that one rank refuses (a wrong argument) takes part in the exchange too: the others raise
instead of waiting for a rank that will not come.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatch, WorldError
from paceline.world.group import Group

_WORDS = 400
"""Bytes kept of a call in words, when calls differ."""


def agree_on_call(
    group: Group,
    call: str,
    *,
    checks: bool,
    problem: WorldError | None = None,
    number: int = 0,
    timeout: timedelta | None = None,
) -> list[int]:
    """Wait until all members make the same ``call``; returns the ``number`` each one brought.

    ``problem`` is why this rank refuses its own call: it is raised here, and the other members
    raise ``CollectiveMismatch``. With ``checks=False`` nobody is met: a problem is raised at
    once and the numbers are not exchanged.
    """
    if group.size == 1 or not checks:
        if problem is not None:
            raise problem
        return [number]
    said = f"refused: {problem}" if problem is not None else call
    mine = torch.tensor([group.next_call(), _fingerprint(said), number], dtype=torch.int64)
    rows = _gather(group, mine, call, timeout).tolist()
    if all(row[:2] == rows[0][:2] for row in rows):
        if problem is not None:
            raise problem
        return [row[2] for row in rows]
    calls = _exchange_words(group, said, call, timeout)
    if problem is not None:
        raise problem
    lines = [f"  rank {rank}: {words}" for rank, words in zip(group.ranks, calls, strict=True)]
    if len(set(calls)) == 1:
        lines = [
            f"{line} (call {row[0]} of this group)" for line, row in zip(lines, rows, strict=True)
        ]
    raise CollectiveMismatch(
        "ranks met in one collective with different calls:\n"
        + "\n".join(lines)
        + "\nEvery rank of the group must call the same collectives in the same order, with the "
        "same shapes, dtypes and arguments."
    )


@contextmanager
def explained(group: Group, call: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Say which call failed, on which rank, when the transport underneath gives up."""
    try:
        yield
    except WorldError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        # Gloo starts with the source file it was built from, and ends with general advice.
        reason = re.sub(r"^\[[^]]*\]\s*", "", reason).partition(". ")[0].rstrip(".")
        if "imed out" in reason:
            seconds = (timeout or group.timeout).total_seconds()
            raise WorldError(
                f"rank {group.ranks[group.rank]} waited {seconds:g} s in {call}: another rank did "
                f"not come to it, or is slower than the timeout. The group cannot be used any "
                f"more. ({reason})"
            ) from error
        raise WorldError(
            f"{call} failed on rank {group.ranks[group.rank]}: {reason}. Another rank has "
            "probably died or left the world; look for the first error among the ranks."
        ) from error


def _fingerprint(words: str) -> int:
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _gather(group: Group, mine: torch.Tensor, call: str, timeout: timedelta | None) -> torch.Tensor:
    """One row for each rank: its ``mine``, a flat tensor of a few bytes.

    All to all, not all_gather: Gloo passes the latter around a ring, one rank after the other,
    which for so little data takes twice as long.
    """
    everyone = mine.new_empty(group.size * mine.numel())
    with explained(group, call, timeout):
        work = dist.all_to_all_single(
            everyone, mine.repeat(group.size), group=group.cpu_group, async_op=True
        )
        work.wait() if timeout is None else work.wait(timeout)
    return everyone.view(group.size, -1)


def _exchange_words(group: Group, said: str, call: str, timeout: timedelta | None) -> list[str]:
    data = said.encode()[:_WORDS].ljust(_WORDS, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = _gather(group, mine, call, timeout).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
