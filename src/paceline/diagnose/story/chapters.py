"""What happened in a run, in order, in words: one chapter an event, steps drawn together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.diagnose.story.worlds import World
from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    Event,
    GaveUp,
    HangFound,
    HangOver,
    NodeJoined,
    NodeLeft,
    NonFinite,
    Note,
    RankLost,
    RanksStarted,
    Restarting,
    RestoreTried,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
    Straggler,
)
from paceline.track.pace import count, duration, number, plural, rate, size


@dataclass(frozen=True)
class Chapter:
    """One thing that happened; ``detail`` is all there is to say of it, in lines.

    ``trouble`` marks what went wrong, ``minor`` what a short telling leaves out.
    """

    time: float
    kind: str
    text: str
    step: int | None = None
    detail: str = ""
    trouble: bool = False
    minor: bool = False


def chapters_of(worlds: Sequence[World]) -> list[Chapter]:
    """The chapters of a run, oldest first."""
    return [chapter for world in worlds for chapter in _of_world(world)]


def _of_world(world: World) -> Iterator[Chapter]:
    steps: list[StepDone] = []
    for event in world.events:
        if isinstance(event, StepDone):
            steps.append(event)
            continue
        chapter = _of_event(event)
        if chapter is None or _is_told(event, world):
            continue
        if steps and not chapter.minor:  # a step or two between small things are not worth a line
            yield _of_steps(steps)
            steps = []
        yield chapter
    if steps:
        yield _of_steps(steps)
    if world.fault is not None and world.fault.kind == "cut_off":
        text = "the record of this start ends here, without an end"
        yield Chapter(world.ended, "CutOff", text, world.fault.step, trouble=True)


def _is_told(event: Event, world: World) -> bool:
    """A failed run repeats the error of the rank that was lost."""
    return isinstance(event, RunFailed) and world.first(RankLost) is not None


def _of_steps(steps: Sequence[StepDone]) -> Chapter:
    first, last = steps[0], steps[-1]
    seconds = sum(s.seconds for s in steps)
    speed = f", {rate(sum(s.samples for s in steps) / seconds)} samples/s" if seconds else ""
    if first is last:
        text = f"step {first.step}: loss {number(first.loss)}"
    else:
        losses = f"loss {number(first.loss)} → {number(last.loss)}"
        text = f"steps {first.step} to {last.step}: {losses}{speed}"
    return Chapter(last.time, "Steps", text, last.step)


def _of_event(event: Event) -> Chapter | None:
    """An event as a chapter; ``None`` for those that are no part of the story."""
    for describe in (_start, _trouble, _hang, _small):
        if (chapter := describe(event)) is not None:
            return chapter
    return None


def _start(event: Event) -> Chapter | None:
    """How the ranks came up, went and came again."""
    kind = type(event).__name__
    match event:
        case RanksStarted():
            return Chapter(event.time, kind, _ranks_started(event))
        case RunStarted():
            begin = f"goes on after step {event.first_step}" if event.first_step else "begins"
            ranks = plural(event.world_size, "rank")
            text = (
                f"training {begin}: {event.layout} on {ranks}, {event.device}, {event.precision}, "
                f"global batch {event.global_batch}, {count(event.parameters)} parameters"
            )
            return Chapter(event.time, kind, text)
        case RestoreTried(ok=True):
            text = f"restored from {event.rung}, step {event.step}, in {duration(event.seconds)}"
            return Chapter(event.time, kind, text, event.step)
        case RestoreTried():
            of_step = "" if event.step is None else f", step {event.step},"
            # Nothing there, or something newer elsewhere, is no trouble.
            fine = event.step is None or event.detail.startswith("stepped over")
            text = f"{event.rung}{of_step} was not used: {event.detail}"
            return Chapter(event.time, kind, text, event.step, trouble=not fine)
        case Restarting():
            return Chapter(event.time, kind, _restarting(event))
        case NodeJoined():
            return Chapter(event.time, kind, f"node {event.host} joined")
        case NodeLeft():
            how = {"lost": "was lost", "preempted": "was taken away"}.get(event.reason, "left")
            lost = event.reason == "lost"
            return Chapter(event.time, kind, f"node {event.host} {how}", trouble=lost)
        case RunFinished():
            ends = {
                "done": "the run was done",
                "stopped": "the run stopped early, by its own rule",
                "interrupted": "the ranks were told to stop, and left",
            }
            text = f"{ends.get(event.reason, event.reason)}: step {event.step}"
            return Chapter(event.time, kind, text, event.step)
    return None


def _ranks_started(event: RanksStarted) -> str:
    ranks = plural(event.world_size or event.nproc, "rank")
    where = ""
    if event.nodes:
        where = f" on {event.nodes[0]}" if len(event.nodes) == 1 else ""
        where = where or f" on {len(event.nodes)} nodes ({', '.join(event.nodes)})"
    again = f" (start {event.attempt + 1})" if event.attempt else ""
    idle = f"; {plural(event.idle, 'rank')} standing by" if event.idle else ""
    return f"{ranks} started{where}{again}{idle}"


_REASONS = {
    "failure": "after a failure",
    "hang": "after a hang",
    "preemption": "because a machine was taken away",
    "node_lost": "without the lost node",
    "node_joined": "with the new node",
}


def _restarting(event: Restarting) -> str:
    budget = "" if event.budget is None else f", {event.used} of {event.budget} such restarts"
    delay = f" in {duration(event.delay)}" if event.delay else ""
    why = _REASONS.get(event.reason, event.reason)
    # What failed or hung has been said just before.
    told = event.reason in ("failure", "hang")
    detail = f": {event.detail}" if event.detail and not told else ""
    return f"starting again{delay}, {why}{budget}{detail}"


def _trouble(event: Event) -> Chapter | None:
    """What went wrong, except hangs."""
    kind = type(event).__name__
    match event:
        case RankLost():
            host = f" on {event.host}" if event.host else ""
            verb = {"hang": "was ended, for it hung", "node": "was lost with its node"}
            how = verb.get(event.cause, "failed")
            error = f": {event.error}" if event.error else ""
            who = f"rank {event.rank}{host}" if event.rank >= 0 else "the world"
            text = f"{who} {how}{error}"
            detail = f"its log: {event.log}" if event.log else ""
            return Chapter(event.time, kind, text, event.step, detail, trouble=True)
        case NonFinite():
            ranks = f" on rank {', '.join(map(str, event.ranks))}" if event.ranks else ""
            then = {"skip": "the step was skipped", "stop": "the run stopped"}.get(event.action)
            text = f"NaN or Inf in the {event.what}{ranks}" + (f"; {then}" if then else "")
            return Chapter(event.time, kind, text, event.step, event.detail, trouble=True)
        case CheckpointFailed():
            text = f"checkpoint of step {event.step} NOT saved: {event.error}"
            return Chapter(event.time, kind, text, event.step, trouble=True)
        case GaveUp():
            return Chapter(event.time, kind, f"gave up: {event.reason}", trouble=True)
        case RunFailed():
            rank = f"rank {event.rank}: " if event.rank >= 0 else ""
            text = f"the run failed: {rank}{event.error}"
            return Chapter(event.time, kind, text, trouble=True)
        case Straggler():
            return Chapter(event.time, kind, straggler_text(event), event.step, trouble=True)
        case Note(level="warning"):
            return Chapter(event.time, kind, event.message, trouble=True)
    return None


def straggler_text(event: Straggler) -> str:
    """Who is slow, in what, and what it costs."""
    host = f" on {event.host}" if event.host else ""
    factor = f"takes {event.factor:.1f} times as long as the others"
    slow = factor if event.factor < 100 else "is slow"
    return (
        f"rank {event.rank}{host} {slow}, most of it in {event.phase}; they wait "
        f"{seconds_of_step(event.costs)} for it every step ({event.share:.0%} of the step)"
    )


def seconds_of_step(seconds: float) -> str:
    """A part of a step, which may be short: 35 ms, 1.2 s."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else duration(seconds)


def _hang(event: Event) -> Chapter | None:
    kind = type(event).__name__
    if isinstance(event, HangFound):
        stood = f"stood still for {duration(event.seconds)}: " if event.seconds else ""
        text = f"{stood}{event.summary}"
        return Chapter(event.time, kind, text, event.step, event.detail, trouble=True)
    if isinstance(event, HangOver):
        text = f"moved again by itself after {duration(event.seconds)}"
        return Chapter(event.time, kind, text, event.step)
    return None


def _small(event: Event) -> Chapter | None:
    """What a short telling leaves out."""
    kind = type(event).__name__
    match event:
        case CheckpointSaved():
            text = f"saved {event.path} ({event.reason}, {size(event.bytes)})"
            return Chapter(event.time, kind, text, event.step, minor=True)
        case EvalDone():
            metrics = ", ".join(f"{name} {number(v)}" for name, v in event.metrics.items())
            return Chapter(event.time, kind, f"validation {metrics}", event.step, minor=True)
        case EpochDone():
            text = f"epoch {event.epoch + 1} done, mean loss {number(event.loss)}"
            return Chapter(event.time, kind, text, event.step, minor=True)
        case Note():
            return Chapter(event.time, kind, event.message, minor=True)
    return None
