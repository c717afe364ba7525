"""A story written down for a person: what went wrong first, what happened, what it cost."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.diagnose.story.causes import RootCause
from paceline.diagnose.story.costs import STANDSTILL, RunCosts
from paceline.diagnose.story.timeline import TimelineEntry
from paceline.events import GaveUp
from paceline.events.wording import at_step
from paceline.formatting import clock, duration, number, plural, samples_per_second

if TYPE_CHECKING:
    from paceline.diagnose.story.story import Story

# A run with hundreds of faults: its beginning and its end tell most.
_FIRST, _LAST = 20, 40
_SHOWN_LINES = 20
_INDENT = "  "
_WIDTH = 100

_KINDS = {
    "failure": "failed ranks",
    "hang": "hangs",
    STANDSTILL: "hangs that went over by themselves",
    "node_lost": "lost nodes",
    "nonfinite": "NaN or Inf",
    "cut_off": "ends without a trace",
    "stopped": "stopping and resuming",
    "preemption": "machines taken away",
    "node_joined": "machines that joined",
}


def write(
    story: Story, *, everything: bool = False, heading: Callable[[str], str] = str
) -> list[str]:
    """The lines of a story; ``everything`` leaves nothing out. ``heading`` may style headings."""
    lines = [f"{story.run}: {headline(story)}"]
    lines += [f"note: {oddity}" for oddity in story.oddities]
    quiet = story.cause is None and not story.faults
    if quiet:
        lines += _went_well(story)
    if story.cause is not None:
        lines += ["", heading(_cause_heading(story)), *_cause(story.cause, everything)]
    if story.ended_by is not None:
        lines += ["", heading("What ended it"), *_cause(story.ended_by, everything)]
    if not quiet or everything:
        lines += ["", heading("What happened"), *_timeline(story, everything)]
        lines += ["", heading("What it cost"), *_costs(story.costs)]
    if story.resume:
        lines += ["", f"To go on: {story.resume}"]
    return lines


def headline(story: Story) -> str:
    """Where the run stands, in one line."""
    facts, costs = story.facts, story.costs
    total = "" if facts.total_steps is None else f" of {facts.total_steps}"
    at = at_step(facts.step) + (total if facts.step else "")
    pace = facts.samples_per_second
    speed = f", {samples_per_second(pace)}" if pace else ""
    spite = ""
    if story.faults:
        spite = f", in spite of {plural(len(story.faults), 'interruption')}"
    match story.state:
        case "done":
            steps = plural(facts.step, "step")
            return f"finished: {steps} in {duration(costs.total)}{speed}{spite}"
        case "stopped":
            return f"stopped early by its own rule {at}, after {duration(costs.total)}{speed}"
        case "interrupted":
            return f"was told to stop {at}, and did; {_saved(story)}"
        case "running":
            phase = f", {facts.phase}" if facts.phase else ""
            step = f", {at}" if facts.step else ""
            return f"is running{phase}{step}{speed}{_left(story)}"
        case "gave_up":
            why = next((c.text for c in reversed(story.chapters) if c.kind == GaveUp.__name__), "")
            return f"failed {at} and {why}; {_saved(story)}"
        case "cut_off":
            return f"ended {at} without a word; {_saved(story)}"
        case _:
            return f"failed {at}; {_saved(story)}"


def _left(story: Story) -> str:
    age = max(0.0, story.told_at - story.facts.last_event_at)
    left = story.facts.seconds_left
    eta = "" if left is None or not left else f", {clock(left)} to go"
    return f"{eta}; its last event ({story.facts.last_event}) is {duration(age)} old"


def _saved(story: Story) -> str:
    step = story.facts.saved_step
    return "nothing is saved" if step is None else f"step {step} is saved"


def _went_well(story: Story) -> list[str]:
    facts = story.facts
    well = "Nothing has gone wrong so far" if story.state == "running" else "Nothing went wrong"
    lines = [f"{well}: no failure, no restart, no hang, no slow rank."]
    if facts.checkpoints:
        many = plural(facts.checkpoints, "checkpoint")
        lines.append(f"{many}, the last of step {facts.saved_step}: {facts.last_checkpoint}")
    elif facts.loss is not None:
        lines.append(f"No checkpoint; the last loss is {number(facts.loss)}.")
    return lines


def _cause_heading(story: Story) -> str:
    if story.state in ("gave_up", "failed", "cut_off"):
        return "Root cause"
    return "What went wrong first" if story.faults else "Worth knowing"


def _cause(cause: RootCause, everything: bool) -> Iterator[str]:
    yield from _wrapped(cause.text)
    if cause.advice:
        yield from _wrapped(f"Next: {cause.advice}.")
    if cause.log:
        yield f"{_INDENT}Its log: {cause.log}"
    if cause.shown:
        lines = cause.shown.splitlines()
        # A whole report of a hang stands where it happened.
        most = len(lines) if everything or cause.kind == "hang" else _SHOWN_LINES
        if len(lines) > most:
            yield f"{_INDENT}  … {len(lines) - most} lines before these: --all shows them"
        yield from (f"{_INDENT}  | {line}".rstrip() for line in lines[-most:])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _timeline(story: Story, everything: bool) -> Iterator[str]:
    told = [c for c in story.chapters if everything or not c.minor]
    cut = 0 if everything else len(told) - _FIRST - _LAST
    days = _days(told)
    shown_already = _reports_shown(story)
    width = max((len(f"step {c.step}") for c in told if c.step is not None), default=0)
    for index, entry in enumerate(told):
        if cut > 0 and _FIRST <= index < _FIRST + cut:
            if index == _FIRST:
                yield f"{_INDENT}… {cut} more: --all shows them"
            continue
        at = datetime.datetime.fromtimestamp(entry.time).strftime(days)
        step = f"step {entry.step}" if entry.step is not None else ""
        mark = "!" if entry.trouble else " "
        yield f"{_INDENT}{at} {mark} {step:<{width}}  {entry.text}"
        if entry.detail and entry.detail not in shown_already:
            yield from (f"{_INDENT}    | {line}".rstrip() for line in entry.detail.splitlines())


def _reports_shown(story: Story) -> set[str]:
    """What stands above already and need not be said twice."""
    causes = [c for c in (story.cause, story.ended_by) if c is not None]
    return {c.shown for c in causes} | {f"its log: {c.log}" for c in causes}


def _days(entries: Sequence[TimelineEntry]) -> str:
    """How times are written: with the day where the story takes more than one."""
    days = {datetime.datetime.fromtimestamp(c.time).date() for c in entries}
    return "%H:%M:%S" if len(days) < 2 else "%m-%d %H:%M:%S"


def _costs(costs: RunCosts) -> Iterator[str]:
    rows = []
    for kind, loss in costs.by_kind.items():
        times = f"{loss.faults}×" if loss.faults else ""
        repeated = f"{plural(loss.repeated, 'step')} repeated" if loss.repeated else ""
        rows.append((_KINDS.get(kind, kind), times, duration(loss.seconds), repeated))
    if costs.stragglers:
        rows.append(("slow ranks", "", duration(costs.stragglers), ""))
    if costs.saving:
        rows.append(("saving", "", duration(costs.saving), ""))
    if costs.skipped_steps:
        times = f"{costs.skipped_steps}×"
        rows.append(("skipped steps", times, duration(costs.skipped), ""))
    whole = costs.lost + costs.stragglers + costs.saving + costs.skipped
    share = f" ({whole / costs.total:.0%})" if costs.total else ""
    rows.append(("all", "", duration(whole), f"of {duration(costs.total)}{share}"))
    if costs.not_running:
        rows.append(("not running", "", duration(costs.not_running), "until somebody resumed it"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, times, seconds, rest in rows:
        line = f"{name:<{widths[0]}}  {times:>{widths[1]}}  {seconds:>{widths[2]}}  {rest}"
        yield f"{_INDENT}{line}".rstrip()
