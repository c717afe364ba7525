"""Who is slow, from where each rank's time went: as a function, no processes."""

from __future__ import annotations

import pytest

from paceline.diagnose.stragglers import StragglerFilter, find_straggler
from paceline.events import Straggler

HOSTS = ["north", "north", "south", "south"]


def split(**phases: list[float]) -> dict[str, list[float]]:
    """Seconds of four ranks that take 100 ms each; the rest of each step is waiting."""
    usual = {"data": 0.005, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "other": 0.005}
    whole = {phase: phases.get(phase, [seconds] * 4) for phase, seconds in usual.items()}
    work = [sum(seconds[rank] for seconds in whole.values()) for rank in range(4)]
    return {**whole, "waiting": [max(work) + 0.01 - own for own in work]}


def test_equal_ranks_are_no_stragglers() -> None:
    assert find_straggler(split(), HOSTS) is None


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_slow_rank_is_named_with_its_phase_and_its_cost(phase: str) -> None:
    seconds = list(split()[phase])
    seconds[2] += 0.1
    found = find_straggler(split(**{phase: seconds}), HOSTS, step=50)
    assert found is not None
    assert (found.rank, found.host, found.phase, found.step) == (2, "south", phase, 50)
    assert found.costs == pytest.approx(0.1)
    assert found.factor == pytest.approx(2.0)
    assert found.share == pytest.approx(0.1 / 0.21)


def test_waiting_makes_no_straggler() -> None:
    phases = split()
    phases["waiting"] = [0.01, 0.5, 0.01, 0.01]  # such as one behind a slow link
    assert find_straggler(phases, HOSTS) is None


def test_less_than_a_tenth_of_the_step_is_not_told() -> None:
    assert find_straggler(split(forward=[0.03, 0.04, 0.03, 0.03]), HOSTS) is None
    assert find_straggler(split(forward=[0.03, 0.043, 0.03, 0.03]), HOSTS) is not None


def test_steps_of_microseconds_have_no_stragglers() -> None:
    tiny = {phase: [s / 1000 for s in seconds] for phase, seconds in
            split(forward=[0.03, 0.03, 0.2, 0.03]).items()}  # fmt: skip
    assert find_straggler(tiny, HOSTS) is None


def test_one_of_several_slow_ranks_is_the_slowest() -> None:
    found = find_straggler(split(backward=[0.05, 0.05, 0.15, 0.2]), HOSTS)
    assert found is not None
    assert (found.rank, found.phase) == (3, "backward")


def test_one_rank_alone_waits_for_nobody() -> None:
    assert find_straggler({phase: [1.0] for phase in split()}, ["north"]) is None


def test_two_ranks_are_held_against_each_other() -> None:
    phases = {phase: seconds[:2] for phase, seconds in split().items()}
    phases |= {"data": [0.005, 0.105], "waiting": [0.11, 0.01]}
    found = find_straggler(phases, HOSTS[:2])
    assert found is not None
    assert (found.rank, found.phase) == (1, "data")


def test_stage_of_a_pipeline_is_held_against_the_same_stage() -> None:
    # Ranks 2 and 3 have the last stage, which has more to do.
    stages = [0, 0, 1, 1]
    uneven = split(forward=[0.03, 0.03, 0.09, 0.09])
    assert find_straggler(uneven, HOSTS, alike=stages) is None
    slow = find_straggler(split(forward=[0.03, 0.06, 0.09, 0.09]), HOSTS, alike=stages)
    assert slow is not None
    assert slow.rank == 1
    # A stage that one rank alone has: only what is no work of the model's can be compared.
    assert find_straggler(uneven, HOSTS, alike=[0, 1, 2, 3]) is None
    late = find_straggler(split(data=[0.005, 0.005, 0.005, 0.2]), HOSTS, alike=[0, 1, 2, 3])
    assert late is not None
    assert late.rank == 3


def told(*found: tuple[int, str] | None) -> list[int | None]:
    """What is told of ranks (and the phase they are slow in) that were found one by one."""
    verdicts = StragglerFilter()
    answers = []
    for number, one in enumerate(found):
        verdict = None
        if one is not None:
            verdict = Straggler(step=number, rank=one[0], host="h", phase=one[1], factor=2.0,
                                costs=0.1, share=0.2)  # fmt: skip
        answer = verdicts.add(verdict)
        answers.append(None if answer is None else answer.rank)
    return answers


def test_told_when_it_lasts_and_once() -> None:
    slow = (1, "data")
    assert told(slow, slow, slow, slow) == [None, 1, None, None]
    assert told(slow, None, slow, None) == [None] * 4
    assert told(slow, slow, None, slow, slow) == [None, 1, None, None, None]


def test_told_again_when_it_changes() -> None:
    slow, other, elsewhere = (1, "data"), (2, "data"), (1, "forward")
    assert told(slow, slow, other, other, other) == [None, 1, None, 2, None]
    assert told(slow, slow, elsewhere, elsewhere) == [None, 1, None, 1]
    assert told(slow, slow, None, None, slow, slow) == [None, 1, None, None, None, 1]


def test_rank_that_is_slow_all_over_is_told_once_though_its_phase_varies() -> None:
    forward, backward = (1, "forward"), (1, "backward")
    assert told(forward, backward, forward, backward) == [None, 1, None, None]
