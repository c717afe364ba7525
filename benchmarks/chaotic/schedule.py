"""Which fault comes when: a function of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# What goes wrong, and how often in a hundred.
SINGLE = {"kill rank": 60, "stop rank": 10, "damage": 15, "full disk": 15}
CLUSTER = {
    "kill rank": 34,
    "stop rank": 12,
    "kill launcher": 12,
    "cut link": 10,
    "blink": 6,
    "slow link": 8,
    "damage": 6,
    "full disk": 6,
    "preempt": 6,
}
MEANINGS = {
    "kill rank": "SIGKILL of a rank",
    "stop rank": "SIGSTOP of a rank, found by the watch on hangs",
    "kill launcher": "SIGKILL of a launcher, which is then started again",
    "cut link": "a host's link cut for longer than the run tolerates, then healed",
    "blink": "a host's link cut for a moment",
    "slow link": "a host's packets late and some lost for a while",
    "damage": "the newest checkpoint damaged, then every process killed and memory emptied",
    "full disk": "the disk of the checkpoints full until a save has failed",
    "preempt": "SIGTERM to a launcher, which comes back",
}


@dataclass(frozen=True)
class Fault:
    """Something to go wrong once the run has done ``step``; ``where`` picks a rank or a host."""

    number: int
    kind: str
    step: int
    where: int
    wait: float
    """Seconds after the step, so that faults hit at any moment of a step."""


def plan(
    kinds: dict[str, int], faults: int, seed: int, gap: int, places: int, only: Sequence[str] = ()
) -> list[Fault]:
    """``faults`` faults, about ``gap`` steps apart, on one of ``places`` ranks or hosts each.

    The first of them go once through all kinds, so that a short run has seen each.
    """
    chosen = {kind: weight for kind, weight in kinds.items() if not only or kind in only}
    if not chosen:
        raise ValueError(f"none of {list(only)} is a kind of fault here; there are {list(kinds)}.")
    draw = Random(seed)
    once = draw.sample(list(chosen), len(chosen))
    rest = draw.choices(list(chosen), list(chosen.values()), k=max(0, faults - len(once)))
    found, step = [], gap
    for number, kind in enumerate((once + rest)[:faults]):
        found.append(Fault(number, kind, step, draw.randrange(places), draw.random() * 0.1))
        step += draw.randint(gap - gap // 2, gap + gap // 2)
    return found
