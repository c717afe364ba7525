"""Why a run failed: a fault and its evidence turned into a sentence and a next step.

Pure functions. What the record shows is stated; what is only likely says "probably".
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.diagnose.story.attempts import RunFault
from paceline.diagnose.story.error_rules import SIGNALS, ErrorRule, hang_advice, rule_for
from paceline.diagnose.story.rank_logs import LogEvidence, LogSource
from paceline.events import Event, RunStarted, StepDone
from paceline.events.wording import after_step, at_step, nonfinite_text, rank_on_host
from paceline.formatting import duration, number


@dataclass(frozen=True)
class RootCause:
    """What went wrong, for a person: ``text`` says it, ``advice`` is the next step.

    ``certain`` is false where ``text`` is a guess. ``shown`` are the lines that show it.
    """

    kind: str
    text: str
    advice: str
    certain: bool = True
    rank: int | None = None
    host: str = ""
    step: int | None = None
    error: str = ""
    log: str = ""
    shown: str = ""


def explain(
    fault: RunFault, evidence: LogSource, events: Sequence[Event], times: int = 1
) -> RootCause:
    """The cause of a fault that came ``times`` times at the same step with the same error."""
    found = None if fault.rank is None else evidence.of(fault.attempt, fault.rank, fault.log)
    if fault.kind == "hang":
        return _hang(fault, found)
    if fault.kind == "nonfinite":
        return _nonfinite(fault, found, events)
    if fault.kind == "node_lost":
        return _lost_node(fault)
    if fault.kind == "cut_off":
        return _cut_off(fault, evidence)
    if fault.kind in _AS_ASKED:
        return _as_asked(fault)
    return _failure(fault, found, evidence, events, times)


def failed_text(fault: RunFault, log: LogEvidence | None = None) -> str:
    """Who failed, when and how, without why: ``rank 1 on a was killed by SIGKILL after step 5``."""
    who = _who(fault)
    if fault.signal:
        return f"{who} was killed by {fault.signal} {after_step(fault.step)}"
    error = fault.error or (log.error if log else "")
    if not error:
        return f"{who} failed {after_step(fault.step)}"
    return f"{who} failed {after_step(fault.step)}: {error.rstrip('.')}"


def sentence(text: str) -> str:
    """``text`` with a capital at its beginning and a full stop at its end."""
    text = text.strip()
    end = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{end}"


def _who(fault: RunFault) -> str:
    if fault.rank is not None:
        return rank_on_host(fault.rank, fault.host)
    return f"a rank on {fault.host}" if fault.host else "a rank"


def _cause(
    fault: RunFault, log: LogEvidence | None, kind: str, text: str, advice: str
) -> RootCause:
    return RootCause(
        kind=kind,
        text=text,
        advice=advice,
        rank=fault.rank,
        host=fault.host,
        step=fault.step,
        error=fault.error,
        log=log.path if log else fault.log,
        shown=log.shown if log else "",
    )


# A rank that raised, left or was killed.


def _failure(
    fault: RunFault,
    log: LogEvidence | None,
    evidence: LogSource,
    events: Sequence[Event],
    times: int,
) -> RootCause:
    rule, certain, log = _rule_and_log(fault, log, evidence)
    told = sentence(failed_text(fault, log))
    if fault.hang is not None:  # what was seen between the ranks says more than how one died of it
        text = f"{sentence(fault.hang.summary)} {told}"
        cause = _cause(fault, log, fault.hang.what, text, hang_advice(fault.hang.what))
        return replace(cause, shown=fault.hang.detail)
    if rule is not None:
        kind, means, advice = rule.kind, rule.says, rule.advice
        means = means if certain or not means else f"probably {means}"
    else:
        kind, means, advice, certain = _without_rule(fault, log)
    parts = [told, sentence(means) if means else "", _first_sign(fault, rule)]
    if times > 1:
        parts.append(f"It came {times} times, at the same step with the same error.")
        if rule is None and not fault.signal:
            certain = False
            kind = "input"
            where = samples_of(events, (fault.step or 0) + 1)
            parts.append(f"Probably it is the input of step {(fault.step or 0) + 1}{where}.")
            advice = f"look at these samples; {advice}"
    elif kind == "error" and (where := samples_of(events, (fault.step or 0) + 1)):
        advice = f"{advice}; it was in step {(fault.step or 0) + 1}{where}"
    text = " ".join(part for part in parts if part)
    cause = _cause(fault, log, kind, text, advice)
    return cause if certain else _guess(cause)


def _rule_and_log(
    fault: RunFault, log: LogEvidence | None, evidence: LogSource
) -> tuple[ErrorRule | None, bool, LogEvidence | None]:
    """The rule that explains a failure, whether it is sure, and the log that shows it."""
    first = _rule_in(fault.error, log)
    if first is not None and first[0].kind not in ("lost_peer", "timeout"):
        return first[0], first[1], log
    if first is not None or not fault.error:
        # It only lost its peers: one of those may know why.
        for other in evidence.of_all(fault.attempt):
            found = _rule_in("", other)
            if found is not None and found[0].kind not in ("lost_peer", "timeout"):
                return found[0], False, other
    return (first[0], first[1], log) if first is not None else (None, False, log)


def _rule_in(error: str, log: LogEvidence | None) -> tuple[ErrorRule, bool] | None:
    """A rule for an error, certain; or for what the log says besides, which is a guess."""
    traceback = log.error if log else ""
    for text in (error, traceback):
        if text and (rule := rule_for(text)) is not None:
            return rule, True
    words = "\n".join(log.last_words) if log else ""
    rule = rule_for(words) if words else None
    return None if rule is None else (rule, False)


def _without_rule(fault: RunFault, log: LogEvidence | None) -> tuple[str, str, str, bool]:
    """Kind, meaning, advice and certainty of a failure that no rule knows."""
    if fault.signal:
        there = f" on {fault.host}" if fault.host else " on its machine"
        kind, means, advice = SIGNALS.get(
            fault.signal, ("killed", "", "look for who sent this signal{there}")
        )
        if log is not None and log.last_words and kind == "crash":
            means = f"{means}: {log.last_words[-1]}"
        return kind, means, advice.format(there=there), False
    if log is not None and log.traceback:
        place = f" (at {log.place})" if log.place else ""
        return "error", "", f"read the traceback below{place}", True
    if fault.error.startswith("exited with code"):
        means = "It raised nothing: something in it called sys.exit or os._exit"
        return "exit", means, "read the last lines of its log", True
    return "error", "", "read the last lines of its log", True


def _first_sign(fault: RunFault, rule: ErrorRule | None) -> str:
    """A checkpoint that could not be written shortly before, where it is of the same kind."""
    unsaved = fault.unsaved
    if unsaved is None or rule is None or rule_for(unsaved.error) is not rule:
        return ""
    return f"The first sign was the checkpoint of step {unsaved.step}, which was not saved."


def _guess(cause: RootCause) -> RootCause:
    return replace(cause, certain=False)


# Everything else.


def _hang(fault: RunFault, log: LogEvidence | None) -> RootCause:
    hang = fault.hang
    if hang is None:
        text = sentence(f"the run stood still {after_step(fault.step)}: {fault.error}")
        return _cause(fault, log, "hang", text, hang_advice(fault.error))
    stood = f"the run stood still {after_step(fault.step)}, for {duration(hang.seconds)}"
    text = f"{stood}: {hang.summary}"
    cause = _cause(fault, log, "hang", sentence(text), hang_advice(hang.what))
    return replace(cause, shown=hang.detail)


def _nonfinite(fault: RunFault, log: LogEvidence | None, events: Sequence[Event]) -> RootCause:
    event = fault.nonfinite
    assert event is not None
    text = [sentence(f"{nonfinite_text(event, at_step(event.step))} stopped the run")]
    started = [e for e in events if isinstance(e, RunStarted)]
    losses = _losses_before(events, event.step)
    data = f"the samples of step {event.step}{samples_of(events, event.step)}"
    skip = "train.nonfinite=skip leaves such steps out"
    if rise := _rise(losses):
        text.append(f"The loss had risen {rise}: probably the learning rate is too high.")
        advice = f"lower optimizer.lr, warm up longer (schedule.warmup_steps), or set {_CLIP}"
    elif started and started[-1].precision == "fp16":
        text.append("Probably numbers too large for fp16.")
        advice = f"try precision=bf16; else look at {data}"
    elif started and 0 < len(event.ranks) < started[-1].world_size:
        text.append("Other ranks were fine: probably a sample.")
        advice = f"look at {data}; {skip}"
    else:
        advice = f"look at {data}, and at optimizer.lr and {_CLIP}; {skip}"
    cause = _cause(fault, log, "nonfinite", " ".join(text), advice)
    return replace(cause, certain=False, shown=event.detail)


_CLIP = "train.clip_norm"


def _losses_before(events: Sequence[Event], step: int) -> list[float]:
    """The finite losses of the last steps before ``step``."""
    losses = {e.step: e.loss for e in events if isinstance(e, StepDone) and e.step < step}
    return [losses[s] for s in sorted(losses)[-20:] if losses[s] - losses[s] == 0]


def _rise(losses: Sequence[float]) -> str:
    """How the loss rose towards its end, if it did so for good: ``from 2.1 to 9.8``."""
    if len(losses) < 3:
        return ""
    low, last = min(losses), statistics.median(losses[-2:])
    return f"from {number(low)} to {number(last)}" if last > 2 * abs(low) else ""


def _lost_node(fault: RunFault) -> RootCause:
    where = f"node {fault.host}" if fault.host else "a node"
    rank = "" if fault.rank is None else f" (its first rank was {fault.rank})"
    text = (
        f"{sentence(f'{where} gave no sign of life any more {after_step(fault.step)}{rank}')} "
        "Probably the machine went down or its network was cut."
    )
    if not fault.host and fault.error:
        text = f"{sentence(fault.error)} {text}"
    advice = (
        f"see whether {fault.host or 'it'} is up (uptime, dmesg), and try the network with "
        "`paceline doctor`; started again there, the same command joins the run"
    )
    return _guess(_cause(fault, None, "node_lost", text, advice))


def _cut_off(fault: RunFault, evidence: LogSource) -> RootCause:
    text = f"the record ends {after_step(fault.step)}, without an end"
    for log in evidence.of_all(fault.attempt):
        found = _rule_in("", log)
        if found is not None and found[0].kind not in ("lost_peer", "timeout"):
            rule = found[0]
            means = sentence(f"a rank's log says why, probably: {rule.says or log.error}")
            return _guess(_cause(fault, log, rule.kind, f"{sentence(text)} {means}", rule.advice))
    means = "Probably the launcher itself was killed, or its machine went down."
    advice = (
        "look at `dmesg | grep -i -e oom -e killed` and at `last -x reboot` on the machine of "
        "the launcher"
    )
    return _guess(_cause(fault, None, "cut_off", f"{sentence(text)} {means}", advice))


_AS_ASKED = {
    "stopped": "it was told to stop (Ctrl-C or SIGTERM) {when}",
    "preemption": "a machine was taken from the run {when}",
    "node_joined": "a machine joined {when}",
}


def _as_asked(fault: RunFault) -> RootCause:
    text = sentence(_AS_ASKED[fault.kind].format(when=after_step(fault.step)))
    return _cause(fault, None, fault.kind, text, "nothing is wrong")


def samples_of(events: Sequence[Event], step: int) -> str:
    """`` (positions 64 to 71 in the order of epoch 1)``: the samples of a step; empty if unknown.

    Known where the record holds all steps of the epoch before it. Positions count from 0.
    """
    started = [e for e in events if isinstance(e, RunStarted)]
    batch = started[-1].global_batch if started else None
    done = {e.step: e for e in events if isinstance(e, StepDone)}
    if batch is None or (step > 1 and step - 1 not in done):
        return ""
    epoch = done[step - 1].epoch if step > 1 else 0
    first, before = 0, step - 1
    while before in done and done[before].epoch == epoch:
        first += done[before].samples
        before -= 1
    if before > 0 and before not in done:
        return ""  # the epoch began before what is recorded
    size = started[-1].samples_per_epoch
    if size is not None and first >= size:
        epoch, first = epoch + 1, 0
    last = first + batch - 1 if size is None else min(first + batch, size) - 1
    return f" (positions {first} to {last} in the order of epoch {epoch + 1})"
