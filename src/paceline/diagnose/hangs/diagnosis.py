"""What is wrong with a run that stands still, from the reports of its ranks. Pure.

For every group, the ranks that have not begun the collective that others are in are missing from
it. Following who waits for whom leads to the ranks that wait for nobody: those are to blame, and
where they are instead says why. Where the waits only lead round in a ring, it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.diagnose.hangs import explain
from paceline.diagnose.hangs.mismatch import Mismatch, first_mismatch
from paceline.diagnose.hangs.rank_heartbeat import (
    ANSWERS,
    GONE,
    LEFT,
    SILENT,
    STOPPED,
    UNREACHABLE,
    RankReport,
)
from paceline.diagnose.hangs.stacks import spot
from paceline.diagnose.hangs.waits import Waits, find_waits

KINDS = (
    "code",  # a rank is in the user's code, others wait for it
    "data",  # the same, in data loading
    "reading",  # … reading or writing something that does not come
    "saving",  # … saving or loading a checkpoint
    "compiling",  # … in torch.compile: told, and left alone
    "disk",  # … in the kernel, uninterruptibly: a disk or a network file system
    "message",  # … in a send or receive that nobody answers
    "native",  # … in native code that holds Python's interpreter
    "stopped",  # … stopped by a signal
    "left",  # … it left the world, or its process ended
    "unreachable",  # nothing is known of it: its machine does not answer
    "mismatch",  # ranks make different calls
    "deadlock",  # ranks wait for each other
    "network",  # all are in the same collective, which does not end
)
"""What a hang may be."""

_BY_STATE = {
    SILENT: "native",
    STOPPED: "stopped",
    LEFT: "left",
    GONE: "left",
    UNREACHABLE: "unreachable",
}

_SURE = (STOPPED, LEFT, GONE)
"""States in which a rank will not come, however short it has been in them."""


_ABSENT = (STOPPED, SILENT, GONE, UNREACHABLE)
"""States in which a rank does not run on, wherever it is."""


@dataclass(frozen=True)
class HangDiagnosis:
    """What is wrong. ``what`` is one of ``KINDS``, ``ranks`` are those to blame.

    ``involved`` are all ranks that stand still for it; ``seconds`` is how long they have.
    """

    what: str
    ranks: tuple[int, ...]
    involved: tuple[int, ...]
    summary: str
    detail: str
    step: int | None
    seconds: float


def diagnose_hang(reports: Mapping[int, RankReport], limit: float) -> HangDiagnosis | None:
    """What these reports of all ranks show; ``None`` when nothing stands still for ``limit`` s."""
    waits = find_waits(reports)
    mismatch = first_mismatch({rank: r.calls for rank, r in reports.items()})
    if mismatch is not None and _is_open(mismatch, reports):
        return _of_mismatch(mismatch, reports, waits)
    what, ranks = _culprits(reports, waits)
    if not ranks:
        return None
    involved = _involved(waits, ranks)
    # Who is to blame must stand still as well: a rank that is merely late moves.
    if any(reports[r].seconds < limit and reports[r].state not in _SURE for r in ranks):
        return None
    return _finding(what, ranks, involved, reports, waits)


def diagnose_mismatch(mismatch: Mismatch, step: int | None) -> HangDiagnosis:
    """Ranks were seen to make different calls; whether that hangs is not known yet."""
    summary = explain.mismatch_summary(mismatch)
    return HangDiagnosis(
        what="mismatch",
        ranks=tuple(mismatch.ranks),
        involved=tuple(mismatch.said),
        summary=summary,
        detail=explain.mismatch_detail(mismatch, hangs=False),
        step=step,
        seconds=0.0,
    )


def kind_of(report: RankReport) -> str:
    """Why a rank that others wait for does not come."""
    if report.disk:
        return "disk"
    if report.message is not None:
        return "message"
    doing = spot(report.stack, phase=report.phase, kernel=report.kernel).doing
    if report.state == SILENT and doing in ("data", "reading", "saving"):
        return doing
    if report.state in _BY_STATE:
        return _BY_STATE[report.state]
    return "code" if doing == "collective" else doing


def _culprits(reports: Mapping[int, RankReport], waits: Waits) -> tuple[str, tuple[int, ...]]:
    """What is wrong, and with which ranks."""
    roots = [rank for rank in waits.roots() if rank in reports]
    if roots:
        # All the same to those that wait; told apart by what can be done about it.
        return kind_of(reports[roots[0]]), tuple(roots)
    ring = waits.cycle()
    if ring:
        return "deadlock", tuple(sorted(ring))
    if waits.waiting:
        # One that was stopped in the middle of a collective has begun it, and is missing all the
        # same.
        absent = [r for r, report in sorted(reports.items()) if report.state in _ABSENT]
        if absent:
            return kind_of(reports[absent[0]]), tuple(absent)
        lonely = [r for r in sorted(waits.waiting) if reports[r].message is not None]
        if lonely:
            return "message", tuple(lonely)
        return "network", tuple(sorted(waits.waiting))
    # Nobody waits in a collective. A program that marks its steps must move all the same.
    silent = [r for r, report in sorted(reports.items()) if report.state in (SILENT, STOPPED)]
    still = [r for r, report in sorted(reports.items()) if report.paced and report.state != LEFT]
    blamed = silent or still
    if not still or not blamed:
        return "", ()
    return kind_of(reports[blamed[0]]), tuple(blamed)


def _involved(waits: Waits, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those to blame and all that wait for them, directly or not."""
    found = set(ranks)
    while more := {r for r, targets in waits.edges.items() if targets & found} - found:
        found |= more
    return tuple(sorted(found))


def _is_open(mismatch: Mismatch, reports: Mapping[int, RankReport]) -> bool:
    """Whether a rank is still in the call, or in one after it that came of it."""
    return any(
        not call.done and call.key == mismatch.key and call.number >= mismatch.number
        for report in reports.values()
        for call in report.calls
    )


def _of_mismatch(
    mismatch: Mismatch, reports: Mapping[int, RankReport], waits: Waits
) -> HangDiagnosis:
    ranks = tuple(mismatch.ranks)
    return HangDiagnosis(
        what="mismatch",
        ranks=ranks,
        involved=tuple(sorted(mismatch.said)),
        summary=explain.mismatch_summary(mismatch),
        detail=explain.mismatch_detail(mismatch, hangs=True)
        + "\n"
        + explain.rank_lines(reports, waits)
        + explain.stack_texts(reports, tuple(sorted(mismatch.said))),
        step=_step(reports),
        seconds=_seconds(reports, tuple(mismatch.said)),
    )


def _finding(
    what: str,
    ranks: tuple[int, ...],
    involved: tuple[int, ...],
    reports: Mapping[int, RankReport],
    waits: Waits,
) -> HangDiagnosis:
    seconds, step = _seconds(reports, involved), _step(reports)
    summary = explain.summary(what, ranks, reports, waits)
    detail = explain.detail(summary, seconds, step, ranks, reports, waits)
    return HangDiagnosis(what, ranks, involved, summary, detail, step, seconds)


def _seconds(reports: Mapping[int, RankReport], ranks: tuple[int, ...]) -> float:
    """How long they have stood, by those that can tell."""
    told = [reports[r].seconds for r in ranks if reports[r].state == ANSWERS]
    return min(told, default=max(reports[r].seconds for r in ranks))


def _step(reports: Mapping[int, RankReport]) -> int | None:
    return max((r.step for r in reports.values() if r.step is not None), default=None)
