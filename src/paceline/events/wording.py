"""Events in words: the one place that decides what a person reads about an event.

``describe`` gives the sentence for an event. The progress display prints it as things happen
(``line_of``), ``paceline diagnose`` lists it with its time, and the summary and the history of
a run use the same phrases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.events.checkpoints import CheckpointFailed, CheckpointSaved, RestoreTried
from paceline.events.event import Event
from paceline.events.log import EventsLost
from paceline.events.measurements import Straggler
from paceline.events.ranks import (
    GaveUp,
    HangFound,
    HangOver,
    NodeJoined,
    NodeLeft,
    RankLost,
    RanksStarted,
    Restarting,
    RunFailed,
)
from paceline.events.training import (
    Baseline,
    EpochDone,
    EvalDone,
    NonFinite,
    Note,
    PhaseProgress,
    RunFinished,
    RunStarted,
)
from paceline.formatting import count, duration, number, plural, ranks_text, short_time, size


@dataclass(frozen=True)
class Wording:
    """What to say about an event: one line of ``text``, and ``detail`` that may have many lines.

    ``trouble`` marks what went wrong, ``minor`` what a short account leaves out. ``live`` is false
    for what needs no line while the run goes.
    """

    text: str
    detail: str = ""
    trouble: bool = False
    minor: bool = False
    live: bool = True


def describe(event: Event) -> Wording | None:
    """The words for an event; ``None`` for those that hold only numbers, like a step."""
    for words in (_training, _checkpoint, _ranks, _hang):
        if (wording := words(event)) is not None:
            return wording
    return None


def line_of(event: Event) -> str | None:
    """What to print about an event when it happens; ``None`` for those that need no line."""
    wording = describe(event)
    if wording is None or not wording.live:
        return None
    text = wording.text
    match event:
        case NonFinite():
            text = f"{text}. {wording.detail}" if wording.detail else f"{text}."
        case RankLost(told_at_end=True):
            text = _rank_lost(event, why=False)
        case RankLost() if wording.detail:
            text = f"{text}; {wording.detail}"
        case HangFound() if event.seconds:
            # The rest of the report, below its first line: every rank, and the stacks.
            _, newline, rest = wording.detail.partition("\n")
            text = f"{text}{newline}{rest}"
    # A restore names the step that it restores.
    step = None if isinstance(event, RestoreTried) else getattr(event, "step", None)
    return text if step is None else f"step {step}: {text}"


def warns(event: Event) -> bool:
    """Whether the line about an event is a warning."""
    wording = describe(event)
    return wording is not None and wording.trouble


def checkpoint_trouble(event: Event) -> str | None:
    """What went wrong with a checkpoint, in a sentence; ``None`` for other events."""
    about_checkpoints = isinstance(event, CheckpointFailed | RestoreTried)
    return line_of(event) if about_checkpoints and warns(event) else None


# Phrases that several sentences share.


def at_step(step: int | None) -> str:
    """``at step 5``, or ``before the first step``."""
    return f"at step {step}" if step else "before the first step"


def after_step(step: int | None) -> str:
    """``after step 5``, or ``before the first step``."""
    return f"after step {step}" if step else "before the first step"


def rank_on_host(rank: int, host: str) -> str:
    """``rank 1 on alpha``."""
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def nonfinite_text(event: NonFinite, when: str = "") -> str:
    """``NaN or Inf in the loss at step 9 on rank 1``; ``when`` is empty, or like ``at step 9``."""
    when = f" {when}" if when else ""
    where = f" on {ranks_text(event.ranks)}" if event.ranks else ""
    return f"NaN or Inf in the {event.what}{when}{where}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """``loss 1.5000, accuracy 0.2500``."""
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


_PHASES = {"evaluation": "evaluating", "prediction": "predicting", "checkpoint": "saving"}


def phase_text(phase: str) -> str:
    """What a run does between steps: ``evaluating``; empty for what is part of a step."""
    return _PHASES.get(phase, "")


def phase_progress_text(event: PhaseProgress) -> str:
    """``evaluating (40 of 100 batches)``."""
    text = phase_text(event.phase) or event.phase
    if not event.done:
        return text
    total = "" if event.total is None else f" of {event.total}"
    return f"{text} ({event.done}{total} batches)"


def restart_reason(event: Restarting) -> str:
    """Why the ranks were started again: ``failure``, ``node lost``."""
    return event.reason.replace("_", " ")


def is_passed_over(event: RestoreTried) -> bool:
    """Whether there was nothing to restore, or something newer elsewhere: no trouble."""
    return event.step is None or event.detail.startswith("stepped over")


# The sentences.


def _training(event: Event) -> Wording | None:
    match event:
        case RunStarted():
            steps = "" if event.total_steps is None else f", {plural(event.total_steps, 'step')}"
            begin = f"; going on after step {event.first_step}" if event.first_step else ""
            return Wording(
                f"training {count(event.parameters)} parameters on "
                f"{plural(event.world_size, 'rank')} ({event.layout}, {event.device}, "
                f"{event.precision}), global batch {event.global_batch}{steps}{begin}"
            )
        case EvalDone():
            metrics = metrics_text(event.metrics)
            text = f"{event.data} {metrics} ({duration(event.seconds)})"
            return Wording(text.lstrip(), minor=True)
        case EpochDone():
            text = f"epoch {event.epoch + 1} done, mean loss {number(event.loss)}"
            return Wording(text, minor=True)
        case NonFinite():
            then = {"skip": "; the step was skipped", "stop": "; the run stops"}
            text = f"{nonfinite_text(event)}{then.get(event.action, '')}"
            return Wording(text, event.detail, trouble=True)
        case Baseline():
            text = f"for comparison, {event.name}: validation loss {number(event.loss)}"
            return Wording(text, minor=True)
        case Note():
            warning = event.level == "warning"
            return Wording(event.message, trouble=warning, minor=not warning)
        case RunFinished():
            ends = {
                "done": "the run was done",
                "stopped": "the run stopped early, by its own rule",
                "interrupted": "the ranks were told to stop, and left",
            }
            text = f"{ends.get(event.reason, event.reason)}: step {event.step}"
            return Wording(text, live=False)
        case EventsLost():
            lasted = duration(event.time - event.since)
            lost = f"{plural(event.count, 'event')} of the last {lasted} could not be written"
            return Wording(f"{lost}: {event.error}", trouble=True)
    return None


def _checkpoint(event: Event) -> Wording | None:
    match event:
        case CheckpointSaved():
            why = "best so far" if event.reason == "best" else event.reason
            return Wording(f"saved {event.path} ({why}, {size(event.bytes)})", minor=True)
        case CheckpointFailed():
            return Wording(f"NOT saved: {event.error}", trouble=True)
        case RestoreTried(ok=True):
            return Wording(
                f"resuming from {event.rung}, step {event.step} ({duration(event.seconds)})"
            )
        case RestoreTried(step=None):
            return Wording(f"cannot resume from {event.rung}: {event.detail}", live=False)
        case RestoreTried():
            text = f"cannot resume from {event.rung}, step {event.step}: {event.detail}"
            return Wording(text, trouble=not is_passed_over(event))
    return None


def _ranks(event: Event) -> Wording | None:
    match event:
        case RanksStarted():
            return Wording(_ranks_started(event))
        case RankLost():
            log = f"its log: {event.log}" if event.log else ""
            return Wording(_rank_lost(event), log, trouble=True)
        case Restarting():
            budget = "" if event.budget is None else f", restart {event.used} of {event.budget}"
            delay = f" in {duration(event.delay)}" if event.delay else ""
            # What failed or hung has just been said.
            said = event.reason in ("failure", "hang")
            detail = f": {event.detail}" if event.detail and not said else ""
            why = restart_reason(event)
            return Wording(f"all ranks are started again{delay} ({why}{budget}){detail}")
        case GaveUp():
            return Wording(f"gave up: {event.reason}", trouble=True)
        case RunFailed():
            rank = f"rank {event.rank}: " if event.rank >= 0 else ""
            return Wording(f"the run failed: {rank}{event.error}", trouble=True, live=False)
        case NodeLeft():
            how = {"lost": "was lost", "preempted": "was told to leave"}.get(event.reason, "left")
            return Wording(f"node {event.host} {how}", trouble=event.reason == "lost")
        case NodeJoined():
            return Wording(f"node {event.host} joined")
        case Straggler():
            waits = f"the others wait {short_time(event.costs)} a step for it ({event.share:.0%})"
            who = rank_on_host(event.rank, event.host)
            return Wording(f"{who} is slow in {event.phase}: {waits}", trouble=True)
    return None


def _hang(event: Event) -> Wording | None:
    match event:
        case HangFound(seconds=0):  # seen before anything stood still
            return Wording(event.summary, event.detail, trouble=True)
        case HangFound():
            then = {
                "restart": "; if it goes on, all ranks are restarted",
                "stop": "; if it goes on, the run is stopped",
            }
            stood = f"nothing has moved for {duration(event.seconds)}: {event.summary}"
            return Wording(f"{stood}{then.get(event.action, '')}", event.detail, trouble=True)
        case HangOver():
            return Wording(moving_again(event.seconds))
    return None


def moving_again(seconds: float) -> str:
    """A hang of so many seconds ended by itself."""
    return f"moving again, after {duration(seconds)}"


def _ranks_started(event: RanksStarted) -> str:
    text = f"starting {plural(event.world_size or event.nproc, 'rank')}"
    if len(event.nodes) > 1:
        text += f" on {len(event.nodes)} nodes ({', '.join(event.nodes)})"
    if event.attempt:
        text += f" (start {event.attempt + 1})"
    return f"{text}, {event.idle} more standing by" if event.idle else text


def _rank_lost(event: RankLost, *, why: bool = True) -> str:
    who = rank_on_host(event.rank, event.host) if event.rank >= 0 else "the run"
    how = {"hang": "hung", "node": "was lost with its node"}.get(event.cause, "failed")
    error = event.error.rstrip(".")
    return f"{who} {how}: {error}" if why and error else f"{who} {how}"
