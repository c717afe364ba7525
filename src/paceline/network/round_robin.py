"""Pairs of machines or ranks that can be measured side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def round_robin(members: Iterable[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which nobody has two partners (a round-robin tournament).

    The pairs of a round can be measured at the same time: none shares its link with another.
    """
    seats: list[int | None] = [*sorted(members)]
    if len(seats) % 2:
        seats.append(None)  # its partner has a rest
    plan = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        plan.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]  # all but the first move on by one
    return [pairs for pairs in plan if pairs]
