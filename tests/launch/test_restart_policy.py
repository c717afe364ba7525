"""When a run is started again, how soon, and when it is given up: the rules, one by one."""

from __future__ import annotations

import dataclasses

import pytest

from paceline import errors
from paceline.errors import LaunchError
from paceline.launch.restart_policy import (
    LONGEST_DELAY,
    PROGRESS_SECONDS,
    PROGRESS_STEPS,
    Ending,
    Kind,
    RestartLimits,
    decide,
    is_users_mistake,
)

LIMITS = RestartLimits(max_restarts=3, backoff=2.0)


def failure(step: int | None, error: str = "", **more: object) -> Ending:
    """One that a restart may help against: it came after some steps, and is not like the others."""
    base = Ending("failure", error or f"RuntimeError: {step}", step=step, raised="RuntimeError")
    return dataclasses.replace(base, moved=True, **more)  # type: ignore[arg-type]


def test_restarts_in_a_row_are_counted_and_back_off() -> None:
    history = [failure(step) for step in (10, 20, 30, 40)]
    decisions = [decide(history[:n], LIMITS) for n in (1, 2, 3, 4)]
    assert [(d.restart, d.delay, d.used, d.budget) for d in decisions] == [
        (True, 0.0, 1, 3),
        (True, 2.0, 2, 3),
        (True, 4.0, 3, 3),
        (False, 0.0, 3, 3),
    ]
    assert decisions[0].reason == "failure"
    assert decisions[3].reason == "3 restarts in a row did not help, and launch.max_restarts is 3"


def test_the_delay_has_an_end() -> None:
    history = [failure(step) for step in range(90)]
    delays = [decide(history[:n], RestartLimits(max_restarts=200)).delay for n in range(1, 90)]
    assert delays[:4] == [0.0, 1.0, 2.0, 4.0]
    assert delays[-1] == max(delays) == LONGEST_DELAY


def test_failures_and_hangs_share_a_budget() -> None:
    hang = Ending("hang", "rank 1 is missing", step=20, moved=True)
    assert decide([failure(10), hang], LIMITS).used == 2
    assert decide([failure(10), hang], LIMITS).reason == "hang"
    assert not decide([failure(10), hang], RestartLimits(max_restarts=1)).restart


@pytest.mark.parametrize(
    ("later", "used"),
    [
        pytest.param(failure(10 + PROGRESS_STEPS), 1, id="many steps later"),
        pytest.param(failure(10 + PROGRESS_STEPS - 1), 3, id="too few steps later"),
        pytest.param(failure(11, seconds=PROGRESS_SECONDS), 1, id="a world that lived long"),
        pytest.param(
            failure(None, seconds=PROGRESS_SECONDS), 1, id="lived long, and does not tell its steps"
        ),
        pytest.param(
            dataclasses.replace(failure(9, seconds=PROGRESS_SECONDS), moved=False),
            3,
            id="lived long without any step",
        ),
    ],
)
def test_real_progress_starts_the_count_anew(later: Ending, used: int) -> None:
    history = [failure(5), failure(10), later]
    assert decide(history, LIMITS).used == used
    assert decide(history, LIMITS).delay == (0.0 if used == 1 else 4.0)


@pytest.mark.parametrize("between", [[], [Ending("node_lost", "b is gone", step=12, moved=True)]])
def test_the_same_error_at_the_same_step_twice_is_given_up_by_name(between: list[Ending]) -> None:
    cursed = failure(12, "ValueError: the third batch is cursed")
    assert decide([cursed], LIMITS).restart
    decision = decide([cursed, *between, cursed], LIMITS)
    assert not decision.restart
    assert decision.reason == (
        "the same error came a second time in a row after step 12: "
        "ValueError: the third batch is cursed"
    )
    later = dataclasses.replace(cursed, step=13)
    assert decide([cursed, later], LIMITS).restart, "another step: it may be another cause"
    counted = failure(12, "rank 1 is missing from all_reduce #101")
    again = dataclasses.replace(counted, error="rank 1 is missing from all_reduce #57")
    assert not decide([counted, again], LIMITS).restart, "numbers count from start to start"
    other = dataclasses.replace(cursed, error="ValueError: something else")
    assert decide([cursed, other, cursed], LIMITS).restart, "not in a row"


def test_a_script_that_does_not_tell_its_steps() -> None:
    unknown = dataclasses.replace(failure(None, "ValueError: x"), moved=None)
    assert decide([unknown], LIMITS).restart, "it may be far beyond its first step"
    assert not decide([unknown, unknown], LIMITS).restart
    after_a_while = dataclasses.replace(unknown, seconds=PROGRESS_SECONDS)
    assert decide([unknown, after_a_while], LIMITS).restart


def test_a_users_mistake_is_not_tried_again() -> None:
    decision = decide([failure(50, "ConfigError: no", users_mistake=True)], LIMITS)
    assert (decision.restart, decision.used) == (False, 0)
    assert decision.reason == "RuntimeError does not go away by itself"


def test_an_exception_before_the_first_step_of_the_launch_is_not_tried_again() -> None:
    early = dataclasses.replace(failure(None, "KeyError: 'x'"), moved=False, raised="KeyError")
    decision = decide([early], LIMITS)
    assert not decision.restart
    assert decision.reason.startswith("KeyError came before the first step was done")
    assert decide([failure(10), early], LIMITS).restart, "this launch has done steps before"


def test_a_rank_killed_before_the_first_step_gets_one_more_chance() -> None:
    killed = Ending("failure", "killed by SIGKILL", killed=True, moved=False)
    assert decide([killed], LIMITS).restart
    decision = decide([killed, killed], LIMITS)
    assert not decision.restart
    assert "killed by SIGKILL again before its first step" in decision.reason


def test_a_rank_killed_from_outside_twice_at_a_step_is_no_pattern() -> None:
    killed = Ending("failure", "killed by SIGKILL", step=50, killed=True, moved=True)
    in_vain = dataclasses.replace(killed, moved=False)
    assert decide([killed, in_vain, in_vain], LIMITS).restart
    assert not decide([killed, in_vain, in_vain, in_vain], LIMITS).restart


@pytest.mark.parametrize("kind", ["node_lost", "node_joined"])
def test_nodes_that_come_or_are_lost_cost_nothing(kind: Kind) -> None:
    history = [Ending(kind, "x", moved=False)] * 20
    decision = decide(history, RestartLimits(max_restarts=0))
    assert (decision.restart, decision.delay, decision.used, decision.budget) == (
        True,
        0.0,
        0,
        None,
    )
    assert decision.reason == kind
    assert decide([failure(10), *history, failure(20)], LIMITS).used == 2


def test_preemptions_have_a_budget_of_their_own() -> None:
    preempted = Ending("preemption", "b was told to leave", step=10, moved=True)
    unlimited = decide([preempted] * 30, RestartLimits(max_restarts=0))
    assert (unlimited.restart, unlimited.delay, unlimited.budget) == (True, 0.0, None)
    two = RestartLimits(max_restarts=0, max_preemptions=2)
    assert decide([preempted] * 2, two) == dataclasses.replace(unlimited, used=2, budget=2)
    decision = decide([preempted] * 3, two)
    assert not decision.restart
    assert decision.reason == (
        "machines were taken from the run 3 times, launch.max_preemptions is 2"
    )
    assert decide([failure(10), *[preempted] * 5, failure(20)], LIMITS).used == 2


def test_preemptions_without_any_movement_between_them_back_off() -> None:
    """As of a program that leaves with that exit code whatever it is asked."""
    in_vain = Ending("preemption", "the ranks were told to leave", moved=None)
    assert [decide([in_vain] * n, LIMITS).delay for n in (1, 2, 3)] == [0.0, 2.0, 4.0]
    moved = dataclasses.replace(in_vain, moved=True)
    assert decide([in_vain, in_vain, moved], LIMITS).delay == 0.0


def test_no_restarts_at_all() -> None:
    decision = decide([failure(10)], RestartLimits(max_restarts=0))
    assert not decision.restart
    assert decision.reason == "launch.max_restarts is 0"


def names(error: type[BaseException]) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in error.__mro__]


class UsersOwn(errors.DataError):
    """A mistake by its base."""


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (errors.ConfigError, True),
        (errors.NonFiniteError, True),
        (errors.MissingExtra, True),
        (errors.CollectiveMismatch, True),
        (UsersOwn, True),
        (IndentationError, True),
        (ModuleNotFoundError, True),
        (errors.StorageError, False),
        (errors.WorldError, False),
        (ValueError, False),
        (OSError, False),
    ],
)
def test_users_mistakes_are_told_by_class(error: type[BaseException], mistake: bool) -> None:
    assert is_users_mistake(names(error)) is mistake


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(LaunchError, match="backoff=-1 must be 0 or more"):
        RestartLimits(backoff=-1)
    with pytest.raises(LaunchError, match="max_preemptions=-2 must be 0 or more"):
        RestartLimits(max_preemptions=-2)
