"""Collectives by which the ranks of a save or load agree, so that all of them go on alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from paceline.errors import CheckpointError, PacelineError
from paceline.world import objects

T = TypeVar("T")


@contextmanager
def explained_timeout(what: str) -> Iterator[None]:
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


def group_size(group: dist.ProcessGroup | None) -> int:
    """How many ranks there are; one where there is no group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's place among them."""
    return 0 if group is None else dist.get_rank(group)


def all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank gave, by rank, on every rank."""
    if group is None:
        return [value]
    with explained_timeout("exchanging what ranks know of snapshots"):
        return objects.all_gather(value, group)


def gather_on_first(value: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """What every rank gave, by rank, on the group's first rank; ``None`` on the others."""
    if group is None:
        return [value]
    with explained_timeout("planning a snapshot"):
        return objects.gather(value, group)


def scatter_from_first(values: Sequence[T] | None, group: dist.ProcessGroup | None) -> T:
    """This rank's of the values that the group's first rank has for everyone."""
    if group is None:
        assert values is not None
        return values[0]
    with explained_timeout("planning a snapshot"):
        mine: T = objects.scatter(values, group)
        return mine


def any_of(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """For each flag, whether it is true on any rank; costs one small message."""
    if group is None:
        return list(flags)
    numbers = torch.tensor(flags, dtype=torch.int32)
    with explained_timeout("agreeing on a snapshot"):
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return [bool(number) for number in numbers.tolist()]


def first_problem(problem: str | None, group: dist.ProcessGroup | None) -> str | None:
    """What is wrong on some rank, in the same words on all; ``None`` where nothing is."""
    if not any_of([problem is not None], group)[0]:
        return None
    return joined_problems(all_gather(problem, group))


def joined_problems(problems: Sequence[str | None]) -> str | None:
    """The problems of all ranks in one text that says whose they are."""
    by_text: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            by_text.setdefault(problem, []).append(rank)
    if len(problems) == 1 or not by_text:
        return next(iter(by_text), None)
    return " ".join(f"Rank {', '.join(map(str, who))}: {text}" for text, who in by_text.items())


def raise_on_all(problem: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank when one has a problem. All ranks must call it."""
    if (found := first_problem(problem, group)) is not None:
        raise CheckpointError(found)
