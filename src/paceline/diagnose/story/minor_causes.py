"""What went wrong in a run without ending it: the cause to name when nothing worse happened."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.diagnose.story.attempts import Attempt, standstills
from paceline.diagnose.story.causes import RootCause, sentence
from paceline.diagnose.story.costs import straggler_seconds
from paceline.diagnose.story.error_rules import hang_advice, rule_for
from paceline.events import (
    CheckpointFailed,
    Event,
    NonFinite,
    RestoreTried,
    Straggler,
)
from paceline.events.wording import at_step, is_passed_over, nonfinite_text, rank_on_host
from paceline.formatting import duration, short_time

_SLOW = {
    "data": "look at where it reads its data from, and at data.workers",
    "waiting": "look at its network: `paceline doctor` measures every pair of machines",
}


def minor_cause(attempts: Sequence[Attempt]) -> RootCause | None:
    """What went wrong first without ending an attempt; a slow rank only if nothing else did."""
    events = [event for attempt in attempts for event in attempt.events]
    for event in events:
        if (cause := _of_event(event)) is not None:
            return cause
    for attempt in attempts:
        for hang, over in standstills(attempt):
            if over is not None:
                stood = f"the run stood still for {duration(over.seconds)}, then went on by itself"
                text = f"{stood}: {hang.summary}" if hang.seconds else hang.summary
                return RootCause(
                    kind="hang" if hang.seconds else hang.what,
                    text=sentence(text),
                    advice=hang_advice(hang.what),
                    rank=hang.ranks[0] if hang.ranks else None,
                    step=hang.step,
                    error=hang.summary,
                    shown=hang.detail,
                )
    return _slowest(attempts)


def _of_event(event: Event) -> RootCause | None:
    if isinstance(event, CheckpointFailed):
        rule = rule_for(event.error)
        return RootCause(
            kind=rule.kind if rule else "not_saved",
            text=sentence(f"the checkpoint of step {event.step} could not be saved: {event.error}"),
            advice=rule.advice if rule else "put right what the message says",
            step=event.step,
            error=event.error,
        )
    if isinstance(event, RestoreTried) and _is_damage(event):
        return RootCause(
            kind="damaged",
            text=sentence(
                f"{event.rung}, step {event.step}, could not be used and was stepped over: "
                f"{event.detail}"
            ),
            advice="`paceline checkpoint verify RUN` names what is damaged; if it happens again, "
            "distrust the disk",
            step=event.step,
            error=event.detail,
        )
    if isinstance(event, NonFinite):
        return RootCause(
            kind="nonfinite",
            text=f"{nonfinite_text(event, at_step(event.step))}: the step was left out.",
            advice="a few are harmless; if they become more, lower optimizer.lr or set "
            "train.clip_norm",
            rank=event.ranks[0] if event.ranks else None,
            step=event.step,
            error=event.detail,
        )
    return None


def _is_damage(event: RestoreTried) -> bool:
    return not event.ok and not is_passed_over(event)


def _slow_text(event: Straggler) -> str:
    """Who is slow, in what, and what it costs."""
    factor = f"takes {event.factor:.1f} times as long as the others"
    slow = factor if event.factor < 100 else "is slow"
    return (
        f"{rank_on_host(event.rank, event.host)} {slow}, most of it in {event.phase}; they wait "
        f"{short_time(event.costs)} for it every step ({event.share:.0%} of the step)"
    )


def _slowest(attempts: Sequence[Attempt]) -> RootCause | None:
    costs = straggler_seconds(attempts)
    if not costs:
        return None
    rank, host, phase = max(costs, key=lambda key: costs[key])
    event = next(
        e
        for attempt in attempts
        for e in attempt.events
        if isinstance(e, Straggler) and (e.rank, e.host, e.phase) == (rank, host, phase)
    )
    there = host or "its machine"
    advice = _SLOW.get(
        phase, f"see what else runs on {there} (top, nvidia-smi: clocks, heat, other programs)"
    )
    return RootCause(
        kind="straggler",
        text=sentence(_slow_text(event)),
        advice=advice,
        rank=rank,
        host=host,
        step=event.step,
    )
