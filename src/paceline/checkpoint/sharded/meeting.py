"""Ranks tell each other what they found, so that all of them go on alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import CheckpointError, PacelineError

T = TypeVar("T")


@contextmanager
def answered(what: str) -> Iterator[None]:
    """When the transport gives up inside, say so by an error of Paceline's."""
    try:
        yield
    except PacelineError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"{what}: another rank did not answer. It died, or took longer than the timeout of "
            f"the group. ({str(error).splitlines()[0]})"
        ) from error


def size_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks there are; one where there is no group."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's place among them."""
    return 0 if group is None else dist.get_rank(group)


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank gave, by rank, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * size_of(group)
    with answered("exchanging what ranks know of snapshots"):
        dist.all_gather_object(values, value, group=group)
    return values


def collect(value: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """What every rank gave, by rank, on the group's first rank; ``None`` on the others."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * size_of(group) if rank_in(group) == 0 else None
    with answered("planning a snapshot"):
        dist.gather_object(value, values, group=group, group_dst=0)
    return values


def hand_out(values: Sequence[T] | None, group: dist.ProcessGroup | None) -> T:
    """This rank's of the values that the group's first rank has for everyone."""
    if group is None:
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    with answered("planning a snapshot"):
        given = None if values is None else list(values)
        dist.scatter_object_list(mine, given, group=group, group_src=0)
    return mine[0]


def any_of(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """For each flag, whether it is true on any rank; costs one small message."""
    if group is None:
        return list(flags)
    numbers = torch.tensor(flags, dtype=torch.int32)
    with answered("agreeing on a snapshot"):
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return [bool(number) for number in numbers.tolist()]


def first_problem(problem: str | None, group: dist.ProcessGroup | None) -> str | None:
    """What is wrong on some rank, in the same words on all; ``None`` where nothing is."""
    if not any_of([problem is not None], group)[0]:
        return None
    return named(gather(problem, group))


def named(problems: Sequence[str | None]) -> str | None:
    """The problems of all ranks in one text that says whose they are."""
    by_text: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            by_text.setdefault(problem, []).append(rank)
    if len(problems) == 1 or not by_text:
        return next(iter(by_text), None)
    return " ".join(f"Rank {', '.join(map(str, who))}: {text}" for text, who in by_text.items())


def agree(problem: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank when one has a problem. All ranks must call it."""
    if (found := first_problem(problem, group)) is not None:
        raise CheckpointError(found)
