"""Findings in words: one line for a console, the whole report for a closer look. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.diagnose.hangs.mismatch import Mismatch, words
from paceline.diagnose.hangs.rank_heartbeat import (
    ANSWERS,
    GONE,
    LEFT,
    SILENT,
    STOPPED,
    UNREACHABLE,
    Call,
    RankReport,
)
from paceline.diagnose.hangs.stacks import spot
from paceline.diagnose.hangs.waits import OpenCollective, Waits
from paceline.events.wording import phase_text
from paceline.formatting import ranks_text

_NATIVE = "is in native code that does not give Python's interpreter back"
_DOING = {
    "code": "is in its own code",
    "data": "is in data loading",
    "reading": "is reading or writing",
    "saving": "is saving or loading a checkpoint",
    "compiling": "compiles its model",
    "disk": "is in disk or network-file-system I/O that cannot be interrupted",
    "collective": "waits",
    "message": "waits for a message",
}


def collective_text(collective: OpenCollective) -> str:
    """``all_reduce #12 [1024] float32 of ranks 0 and 1``."""
    backend, name, ranks = collective.key
    call = _numbered(collective.call, collective.number)
    return f"{call} of {ranks_text(ranks)} ({backend} group {name!r})"


def summary(
    what: str, ranks: tuple[int, ...], reports: Mapping[int, RankReport], waits: Waits
) -> str:
    """The finding in one line."""
    if what == "deadlock":
        return f"{ranks_text(ranks)} wait for each other: " + "; ".join(
            f"rank {rank} in {_wait_text(reports[rank], waits)}" for rank in ranks
        )
    if what == "network":
        collective = next(m for m in waits.collectives if ranks[0] in m.inside)
        return (
            f"{ranks_text(collective.inside)} have all reached {collective_text(collective)} and "
            "it does not end: the network between them, or the backend"
        )
    told = "; ".join(f"rank {rank} {doing(reports[rank])}" for rank in ranks[:3])
    more = f"; and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"{_missing_text(ranks, reports, waits)}: {told}{more}"


def doing(report: RankReport) -> str:
    """What a rank does instead of coming."""
    if report.state == STOPPED:
        return "is stopped (SIGSTOP or a debugger; kill -CONT lets it go on)"
    if report.state in (LEFT, GONE):
        when = "" if report.step is None else f" after step {report.step}"
        left = report.state == LEFT
        return f"left the run{when}" if left else f"is gone{when}: its process ended"
    if report.state == UNREACHABLE:
        return "cannot be reached: its machine does not answer"
    at = spot(report.stack, phase=report.phase, kernel=report.kernel)
    if report.message is not None:
        return f"is in {_message_text(report)}, at {at.where}"
    kind = "disk" if report.disk else "code" if at.doing == "collective" else at.doing
    text = _DOING[kind]
    if report.state == SILENT:
        text = _NATIVE if kind == "code" else f"{text}, {_NATIVE.removeprefix('is ')}"
    return f"{text}, at {at.where}" if at.frame else text


def detail(
    line: str,
    seconds: float,
    step: int | None,
    ranks: tuple[int, ...],
    reports: Mapping[int, RankReport],
    waits: Waits,
) -> str:
    """The whole report: the line, every rank, and the stacks of those to blame."""
    at = "" if step is None else f" at step {step}"
    head = f"the run has not moved for {seconds:.0f} s{at}: {line}"
    return f"{head}\n{rank_lines(reports, waits)}{stack_texts(reports, ranks)}"


def rank_lines(reports: Mapping[int, RankReport], waits: Waits) -> str:
    """One line for each rank; ranks that say the same share one."""
    lines: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        lines.setdefault(_rank_line(report, waits), []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {line}" for line, ranks in lines.items())


def stack_texts(reports: Mapping[int, RankReport], ranks: Sequence[int]) -> str:
    """The Python stacks of these ranks."""
    texts = []
    for rank in ranks:
        report = reports[rank]
        if report.stack:
            lines = [f"\nStack of rank {rank} (pid {report.pid} on {report.host}):"]
            for frame in report.stack:
                lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
                if frame.code:
                    lines.append(f"    {frame.code}")
            texts.append("\n".join(lines))
        elif report.state in (SILENT, STOPPED, UNREACHABLE):
            texts.append(f"\nStack of rank {rank}: cannot be had ({report.state}).")
    return "".join(texts)


def mismatch_summary(mismatch: Mismatch) -> str:
    """Who called what, in one line."""
    by_words: dict[str, list[int]] = {}
    for rank, said in mismatch.said.items():
        by_words.setdefault(said, []).append(rank)
    calls = ", ".join(f"{ranks_text(ranks)} {said}" for said, ranks in by_words.items())
    backend, name, _ = mismatch.key
    return (
        f"ranks make different calls in collective #{mismatch.number} of {backend} group "
        f"{name!r}: {calls}"
    )


def mismatch_detail(mismatch: Mismatch, *, hangs: bool) -> str:
    """The same with every rank, and what comes of it."""
    lines = [f"  rank {rank}: {said}" for rank, said in sorted(mismatch.said.items())]
    after = "They cannot meet." if hangs else _after_mismatch(mismatch)
    return "\n".join([mismatch_summary(mismatch), *lines, after])


def _after_mismatch(mismatch: Mismatch) -> str:
    """What is known to come of it when it is first seen: whether it hangs shows later."""
    still_there = sorted(set(mismatch.said) - mismatch.gone_on)
    if still_there:
        have = "has" if len(still_there) == 1 else "have"
        return (
            f"{ranks_text(still_there).capitalize()} {have} not gone on from it so far: it may "
            "hang. If it ends, what it returns is not what either rank means."
        )
    return (
        "All of them have gone on from it. What such a call returns is not what either rank means, "
        "and later ones may wait for calls that never come."
    )


def last_words(last: Sequence[Call], neighbours: Sequence[RankReport]) -> str:
    """Where a rank was when an error ended it: ``in all_reduce #4 …; rank 1 left the run``."""
    parts = []
    if last:
        calls = " and ".join(
            f"{_numbered(call, call.number)} of {ranks_text(call.ranks)}" for call in last
        )
        parts.append(f"in {calls}")
    parts += [f"rank {r.rank} {doing(r)}" for r in neighbours if r.state in (LEFT, GONE, STOPPED)]
    return "; ".join(parts)


def _numbered(call: Call | None, number: int) -> str:
    """``all_reduce #12 [1024] float32``."""
    if call is None:
        return f"collective #{number}"
    op, _, rest = words(call).partition(" ")
    return f"{op} #{number} {rest}".strip()


def _missing_text(ranks: tuple[int, ...], reports: Mapping[int, RankReport], waits: Waits) -> str:
    collectives = [m for m in waits.collectives if set(m.missing) & set(ranks)]
    if collectives:
        collective = max(collectives, key=lambda m: len(m.inside))
        missing = ranks_text([r for r in ranks if r in collective.missing])
        verb = "is" if len([r for r in ranks if r in collective.missing]) == 1 else "are"
        return (
            f"{missing} {verb} missing from {collective_text(collective)}, in which "
            f"{ranks_text(collective.inside)} {'wait' if len(collective.inside) > 1 else 'waits'}"
        )
    waiting = [r for r, targets in waits.edges.items() if targets & set(ranks)]
    if waiting:
        texts = [f"rank {r} is in {_wait_text(reports[r], waits)}" for r in sorted(waiting)[:3]]
        return f"{ranks_text(ranks)} do{'es' if len(ranks) == 1 else ''} not come: " + "; ".join(
            texts
        )
    return f"{ranks_text(ranks)} do{'es' if len(ranks) == 1 else ''} not move"


def _rank_line(report: RankReport, waits: Waits) -> str:
    step = "" if report.step is None else f"step {report.step}, "
    step += f"{phase}, " if (phase := phase_text(report.phase)) else ""
    inside = [m for m in waits.collectives if report.rank in m.inside]
    if report.state != ANSWERS:
        return f"{step}{doing(report)}"
    at = spot(report.stack, phase=report.phase, kernel=report.kernel)
    if inside or report.message is not None:
        return f"{step}waits in {_wait_text(report, waits)}, at {at.where}"
    last = max((c for c in report.calls), key=lambda c: c.number, default=None)
    past = "" if last is None else f"; its last collective: {_numbered(last, last.number)}"
    return f"{step}{doing(report)}{past}"


def _wait_text(report: RankReport, waits: Waits) -> str:
    if report.message is not None:
        return _message_text(report)
    inside = [m for m in waits.collectives if report.rank in m.inside]
    return " and ".join(collective_text(m) for m in inside) or "nothing that is on record"


def _message_text(report: RankReport) -> str:
    assert report.message is not None
    direction = "to" if report.message.op == "send" else "from"
    peer = "any rank" if report.message.peer is None else f"rank {report.message.peer}"
    return f"{report.message.op} {direction} {peer}"
