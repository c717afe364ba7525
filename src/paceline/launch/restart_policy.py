"""What follows when a world has ended before its time: started again, when, or given up.

Pure functions over plain data; the agent acts on them. The rules, for what is called a *failure*
(a rank raised, exited or was killed) or a *hang* (it was killed because nothing moved):

- A user's mistake (``is_users_mistake``) is not tried again, nor is any Python exception
  before the first step of the launch was done: a restart would only repeat it.
- The same error at the same step a second time in a row is not tried again.
- A rank killed from outside (SIGKILL, say: the machine ran out of memory) before the first step of
  the launch was done gets one more chance.
- Otherwise there are ``max_restarts`` restarts in a row. A row ends, and the count starts anew,
  with real progress: ``PROGRESS_STEPS`` steps more than at the failure before, or a world that
  moved and lived for ``PROGRESS_SECONDS``.
- The first restart of a row comes at once, the second after ``backoff`` seconds, each further one
  after twice the time, up to ``LONGEST_DELAY``.

Nodes that are lost, or that come, cost nothing. Nodes that are taken away (preempted) have a budget
of their own; a row of them without any movement backs off as failures do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import LaunchError

Kind = Literal["failure", "hang", "preemption", "node_lost", "node_joined"]

PROGRESS_STEPS = 100
"""That many steps after a failure, the next one is the first of a new row."""

PROGRESS_SECONDS = 600.0
"""A world that moved and lived this long has made progress, however long its steps take."""

LONGEST_DELAY = 60.0
"""Seconds that no restart waits longer than."""

_MISTAKES = frozenset(
    [
        *(f"builtins.{name}" for name in ("SyntaxError", "ImportError", "NameError")),
        *(
            f"paceline.errors.{name}"
            for name in (
                "ConfigError",
                "LayoutError",
                "DataError",
                "LossError",
                "TrainingError",
                "NonFiniteError",
                "CollectiveMismatch",
                "LaunchError",
                "MissingExtra",
                "NotSaved",
            )
        ),
        # The program itself decided to leave: argparse, or sys.exit(1).
        "builtins.SystemExit",
    ]
)


@dataclass(frozen=True)
class Ending:
    """How a world ended. ``error`` is one line; ``raised`` the exception's type, "" without one."""

    kind: Kind
    error: str
    step: int | None = None
    """The last step done, ``None`` if not known."""
    raised: str = ""
    users_mistake: bool = False
    killed: bool = False
    """By a signal that comes from outside, like SIGKILL, not from a crash of its own."""
    moved: bool | None = None
    """Whether this world did any step; ``None`` if not known."""
    seconds: float = 0.0
    """How long it ran."""
    refused: bool = False
    """Whether Paceline itself refused to go on, because of a user's mistake."""


@dataclass(frozen=True)
class RestartLimits:
    """How often, and how fast, a run is started again; the keys of the same names in ``launch``."""

    max_restarts: int = 0
    max_preemptions: int | None = None
    backoff: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_restarts", "max_preemptions", "backoff"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise LaunchError(f"{name}={value} must be 0 or more.")


@dataclass(frozen=True)
class Decision:
    """Whether to start the ranks again, after how many seconds, and why (not).

    ``used`` of ``budget`` restarts of this kind are used, this one included; ``budget`` is ``None``
    where there is no limit. ``reason`` is the kind of the ending for a restart, else the rule that
    forbids it, in words. ``would_recur``: not tried again because it would end the same way.
    """

    restart: bool
    delay: float
    reason: str
    used: int = 0
    budget: int | None = None
    would_recur: bool = False


def decide(history: Sequence[Ending], limits: RestartLimits) -> Decision:
    """What follows the last of these endings, by the rules at the top of this file."""
    last = history[-1]
    if last.kind in ("node_lost", "node_joined"):
        return Decision(True, 0.0, last.kind)
    if last.kind == "preemption":
        return _after_preemption(history, limits)
    row = _row(history)
    used, budget = len(row), limits.max_restarts
    if (rule := _forbidden(history, row)) is not None:
        return Decision(False, 0.0, rule, used - 1, budget, would_recur=True)
    if used > budget:
        return Decision(False, 0.0, _out_of_restarts(budget), budget, budget)
    return Decision(True, _delay(used, limits.backoff), last.kind, used, budget)


def is_users_mistake(types: Iterable[str]) -> bool:
    """Whether an exception is one that only the user can do something about.

    ``types`` are the qualified names of its class and of all its bases.
    """
    return not _MISTAKES.isdisjoint(types)


def _after_preemption(history: Sequence[Ending], limits: RestartLimits) -> Decision:
    used = sum(ending.kind == "preemption" for ending in history)
    budget = limits.max_preemptions
    if budget is not None and used > budget:
        rule = f"machines were taken from the run {used} times, launch.max_preemptions is {budget}"
        return Decision(False, 0.0, rule, budget, budget)
    in_vain = 0
    for ending in reversed(history):
        if ending.kind != "preemption" or ending.moved or ending.seconds >= PROGRESS_SECONDS:
            break
        in_vain += 1
    return Decision(True, _delay(in_vain, limits.backoff), "preemption", used, budget)


def _row(history: Sequence[Ending]) -> list[Ending]:
    """The failures and hangs up to the last one, with no real progress between them."""
    row: list[Ending] = []
    for ending in history:
        if ending.kind not in ("failure", "hang"):
            continue
        if row and _made_progress(row[-1], ending):
            row = []
        row.append(ending)
    return row


def _made_progress(before: Ending, ending: Ending) -> bool:
    if ending.moved is not False and ending.seconds >= PROGRESS_SECONDS:
        return True
    if before.step is None or ending.step is None:
        return False
    return ending.step - before.step >= PROGRESS_STEPS


def _forbidden(history: Sequence[Ending], row: Sequence[Ending]) -> str | None:
    """The rule that forbids another try, whatever is left of the budget."""
    last = row[-1]
    name = last.raised or last.error
    if last.users_mistake:
        return f"{name} does not go away by itself"
    # Not `not moved`: a script that does not report its steps may be far beyond the first.
    never_moved = all(ending.moved is False for ending in history)
    if last.raised and never_moved:
        return f"{name} came before the first step was done, and would come again"
    if last.killed:
        if never_moved and len(row) > 1:
            return f"the run was {last.error} again before its first step was done"
        return None
    if len(row) > 1 and (_words(row[-2]), row[-2].step) == (_words(last), last.step):
        where = "" if last.step is None else f" after step {last.step}"
        return f"the same error came a second time in a row{where}: {last.error}"
    return None


def _words(ending: Ending) -> str:
    """The error without its numbers: seconds, counts and addresses differ from start to start."""
    return re.sub(r"\d+", "", ending.error)


def _out_of_restarts(budget: int) -> str:
    if budget == 0:
        return "launch.max_restarts is 0"
    times = "restart" if budget == 1 else "restarts in a row"
    return f"{budget} {times} did not help, and launch.max_restarts is {budget}"


def _delay(number: int, backoff: float) -> float:
    """Seconds before the ``number``-th restart of a row, which counts from 1."""
    if number <= 1:
        return 0.0
    return float(min(LONGEST_DELAY, backoff * 2.0 ** min(number - 2, 32)))
