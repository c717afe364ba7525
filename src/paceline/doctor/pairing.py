"""Who is measured with whom, and what machines are called: decided alike on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which nobody has two partners (a round-robin tournament).

    So that pairs can be measured side by side, and none shares its link with another.
    """
    seats: list[int | None] = list(members)
    if len(seats) % 2:
        seats.append(None)  # its partner has a rest
    plan = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        plan.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]  # all but the first move on by one
    return plan


def distinct_names(hosts: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """A name for each machine: its host name, with its address or a number where that is shared."""
    names = list(hosts)
    if len(set(names)) < len(names):
        shared = Counter(hosts)
        names = [
            f"{host}/{address}" if shared[host] > 1 and address else host
            for host, address in zip(hosts, addresses, strict=True)
        ]
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return distinct
