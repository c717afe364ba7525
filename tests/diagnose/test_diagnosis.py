"""From reports to a finding: who is to blame, for what, and in which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.diagnose.hangs.diagnosis import KINDS, HangDiagnosis, diagnose_hang
from paceline.diagnose.hangs.rank_heartbeat import (
    GONE,
    LEFT,
    SILENT,
    STOPPED,
    UNREACHABLE,
    Call,
    Frame,
    GroupProgress,
    PointToPoint,
    RankReport,
)

LIMIT = 10.0
ALL = (0, 1, 2, 3)
TORCH = "/venv/lib/python3.11/site-packages/torch"
IN_COLLECTIVE = (
    Frame("/home/me/train.py", 7, "main", "dist.all_reduce(x)"),
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()"),
)
IN_CODE = (
    Frame("/home/me/train.py", 9, "main", "crunch()"),
    Frame("/home/me/slow.py", 3, "crunch", "time.sleep(1)"),
)
IN_DATA = (
    Frame("/home/me/train.py", 9, "main", "for batch in loader:"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 700, "__next__", "data = self._next_data()"),
    Frame("/home/me/data.py", 30, "__getitem__", "return self.fetch(index)"),
)


def call(
    number: int,
    op: str = "all_reduce",
    shape: tuple[int, ...] = (4,),
    dtype: str = "float32",
    *,
    ranks: tuple[int, ...] = (0, 1),
    group: str = "0",
    done: bool = True,
) -> Call:
    return Call("gloo", group, ranks, number, op, (shape,), (dtype,), done)


def waiting(
    rank: int, number: int, *, ranks: tuple[int, ...] = (0, 1), group: str = "0", **changes: Any
) -> RankReport:
    """A rank that waits in the ``number``-th collective of a group."""
    report = RankReport(
        rank=rank,
        seconds=12.0,
        step=5,
        groups=(GroupProgress("gloo", group, ranks, number, number - 1),),
        calls=(
            call(number - 1, ranks=ranks, group=group),
            call(number, ranks=ranks, group=group, done=False),
        ),
        stack=IN_COLLECTIVE,
    )
    return dataclasses.replace(report, **changes)


def elsewhere(
    rank: int, done: int, *, ranks: tuple[int, ...] = (0, 1), group: str = "0", **changes: Any
) -> RankReport:
    """A rank whose collectives are over, and that is in code of its own."""
    report = RankReport(
        rank=rank,
        seconds=12.0,
        step=5,
        groups=(GroupProgress("gloo", group, ranks, done, done),),
        calls=(call(done, ranks=ranks, group=group),),
        stack=IN_CODE,
    )
    return dataclasses.replace(report, **changes)


def verdict(*reports: RankReport) -> HangDiagnosis | None:
    return diagnose_hang({report.rank: report for report in reports}, LIMIT)


def found(*reports: RankReport) -> HangDiagnosis:
    finding = verdict(*reports)
    assert finding is not None
    assert finding.what in KINDS
    return finding


def test_missing_rank_call_and_place_are_named() -> None:
    finding = found(waiting(0, 8), elsewhere(1, 7))
    assert (finding.what, finding.ranks, finding.involved) == ("code", (1,), (0, 1))
    assert "rank 1 is missing from all_reduce #8 [4] float32 of ranks 0 and 1" in finding.summary
    assert "slow.py:3 in crunch" in finding.summary
    assert "\n" not in finding.summary
    assert 'File "/home/me/slow.py", line 3, in crunch' in finding.detail
    assert "time.sleep(1)" in finding.detail
    assert (finding.step, finding.seconds) == (5, 12.0)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"stack": IN_DATA}, "data", "in data loading"),
        ({"phase": "data"}, "data", "in data loading"),
        ({"kernel": "anon_pipe_read"}, "reading", "reading or writing"),
        ({"kernel": "hrtimer_nanosleep"}, "code", "in its own code"),
        ({"disk": True}, "disk", "cannot be interrupted"),
        ({"state": STOPPED, "stack": ()}, "stopped", "kill -CONT"),
        ({"state": SILENT}, "native", "Python's interpreter"),
        ({"state": LEFT, "stack": ()}, "left", "left the run after step 5"),
        ({"state": GONE, "stack": ()}, "left", "gone after step 5"),
        ({"state": UNREACHABLE, "stack": ()}, "unreachable", "does not answer"),
        (
            {"stack": (Frame(f"{TORCH}/serialization.py", 900, "save"),)},
            "saving",
            "saving or loading a checkpoint",
        ),
        (
            {"stack": (*IN_CODE, Frame(f"{TORCH}/_inductor/compile_fx.py", 1, "compile_fx"))},
            "compiling",
            "compiles",
        ),
    ],
)
def test_why_a_rank_does_not_come(changes: dict[str, Any], kind: str, words: str) -> None:
    finding = found(waiting(0, 8), elsewhere(1, 7, **changes))
    assert (finding.what, finding.ranks) == (kind, (1,))
    assert words in finding.summary
    assert "all_reduce #8" in finding.summary


def test_a_late_rank_that_moves_is_no_hang() -> None:
    assert verdict(waiting(0, 8), elsewhere(1, 7, seconds=2.0)) is None
    assert verdict(waiting(0, 8), elsewhere(1, 7, state=SILENT, seconds=2.0)) is None


def test_a_stopped_rank_needs_no_proof_of_time() -> None:
    finding = found(waiting(0, 8), elsewhere(1, 7, state=STOPPED, seconds=0.0))
    assert finding.seconds == 12.0  # as the waiting rank has it: the stopped one cannot tell


def test_nobody_waits_and_no_steps_are_marked() -> None:
    """A program that computes for long, with nobody waiting, is left alone."""
    assert verdict(elsewhere(0, 7), elsewhere(1, 7)) is None


def test_nobody_waits_but_a_step_does_not_end() -> None:
    finding = found(elsewhere(0, 7, paced=True, phase="data"))
    assert (finding.what, finding.ranks) == ("data", (0,))
    assert "rank 0 does not move" in finding.summary


def test_chain_of_waits_leads_to_its_end() -> None:
    """0 and 1 wait for 2 in one group, 2 waits for 3 in another: 3 is to blame alone."""
    first, second = (0, 1, 2), (2, 3)
    finding = found(
        waiting(0, 4, ranks=first, group="a"),
        waiting(1, 4, ranks=first, group="a"),
        waiting(2, 9, ranks=second, group="b"),
        elsewhere(3, 8, ranks=second, group="b"),
    )
    assert finding.ranks == (3,)
    assert finding.involved == (0, 1, 2, 3)
    assert "all_reduce #9 [4] float32 of ranks 2 and 3" in finding.summary


def test_several_missing_ranks() -> None:
    reports = [waiting(0, 8, ranks=ALL), waiting(1, 8, ranks=ALL)]
    finding = found(*reports, elsewhere(2, 7, ranks=ALL), elsewhere(3, 7, ranks=ALL))
    assert finding.ranks == (2, 3)
    assert "ranks 2 and 3 are missing" in finding.summary
    assert finding.detail.count("Stack of rank") == 2


def test_ranks_that_say_the_same_share_a_line() -> None:
    reports = [waiting(rank, 8, ranks=ALL) for rank in (0, 1, 2)]
    finding = found(*reports, elsewhere(3, 7, ranks=ALL))
    assert "ranks 0 to 2: step 5, waits in all_reduce #8" in finding.detail


def test_deadlock_across_two_groups() -> None:
    both = (0, 1)
    zero = waiting(0, 1, group="a")
    one = waiting(1, 1, group="b")
    zero = dataclasses.replace(zero, groups=(*zero.groups, GroupProgress("gloo", "b", both, 0, 0)))
    one = dataclasses.replace(one, groups=(*one.groups, GroupProgress("gloo", "a", both, 0, 0)))
    finding = found(zero, one)
    assert (finding.what, finding.ranks) == ("deadlock", (0, 1))
    assert "rank 0 in all_reduce #1 [4] float32 of ranks 0 and 1 (gloo group 'a')" in (
        finding.summary
    )


def test_deadlock_of_three_leaves_the_fourth_alone() -> None:
    finding = found(
        waiting(0, 1, ranks=(0, 1), group="a"),
        waiting(1, 1, ranks=(1, 2), group="b"),
        waiting(2, 1, ranks=(0, 2), group="c"),
        elsewhere(3, 4, ranks=(3,), group="d", seconds=0.0),
    )
    assert (finding.what, finding.ranks) == ("deadlock", (0, 1, 2))
    assert 3 not in finding.involved


def test_collective_in_the_background_of_a_busy_rank_is_no_deadlock() -> None:
    """Rank 1 began group b's collective without waiting for it and is busy: it is to blame."""
    zero = waiting(0, 3, group="a")
    one = waiting(1, 5, group="b", stack=IN_CODE)
    zero = dataclasses.replace(
        zero, groups=(*zero.groups, GroupProgress("gloo", "b", (0, 1), 4, 4))
    )
    one = dataclasses.replace(one, groups=(*one.groups, GroupProgress("gloo", "a", (0, 1), 2, 2)))
    finding = found(zero, one)
    assert (finding.what, finding.ranks) == ("code", (1,))


def test_later_collectives_do_not_hide_the_first() -> None:
    """Rank 0 has begun 8, 9 and 10; rank 1 is missing from 8."""
    calls = tuple(call(n, done=False) for n in (8, 9, 10))
    ahead = waiting(0, 8, groups=(GroupProgress("gloo", "0", (0, 1), 10, 7),), calls=calls)
    assert "all_reduce #8 " in found(ahead, elsewhere(1, 7)).summary


def test_same_collective_on_all_ranks_is_the_network() -> None:
    finding = found(waiting(0, 8), waiting(1, 8))
    assert (finding.what, finding.ranks) == ("network", (0, 1))
    assert "have all reached all_reduce #8" in finding.summary


@pytest.mark.parametrize(
    ("state", "kind"),
    [(STOPPED, "stopped"), (SILENT, "native"), (GONE, "left"), (UNREACHABLE, "unreachable")],
)
@pytest.mark.parametrize("begun", [waiting, elsewhere], ids=["in it", "through it"])
def test_a_rank_that_stopped_within_a_collective_is_to_blame(begun, state: str, kind: str) -> None:
    finding = found(begun(0, 8, state=state), waiting(1, 8))
    assert (finding.what, finding.ranks) == (kind, (0,))
    assert finding.summary.startswith("rank 0 ")


def test_messages() -> None:
    receiving = elsewhere(0, 3, message=PointToPoint("recv", 1))
    finding = found(receiving, elsewhere(1, 3))
    assert (finding.what, finding.ranks) == ("code", (1,))
    assert "rank 0 is in recv from rank 1" in finding.summary

    both = found(receiving, elsewhere(1, 3, message=PointToPoint("recv", 0)))
    assert (both.what, both.ranks) == ("deadlock", (0, 1))

    crossed = found(receiving, waiting(1, 4))
    assert (crossed.what, crossed.ranks) == ("deadlock", (0, 1))
    assert "rank 0 in recv from rank 1" in crossed.summary
    assert "rank 1 in all_reduce #4" in crossed.summary


def test_message_from_anyone() -> None:
    finding = found(elsewhere(0, 3, message=PointToPoint("recv", None)), elsewhere(1, 3))
    assert (finding.what, finding.ranks) == ("message", (0,))
    assert "recv from any rank" in finding.summary


def test_mismatch_in_a_hang_names_all_calls_and_the_odd_one_out() -> None:
    odd = call(8, "broadcast", ranks=(0, 1, 2), done=False)
    reports = [waiting(rank, 8, ranks=(0, 1, 2)) for rank in range(3)]
    reports[2] = dataclasses.replace(reports[2], calls=(odd,))
    finding = found(*reports)
    assert (finding.what, finding.ranks) == ("mismatch", (2,))
    assert "ranks 0 and 1 all_reduce [4] float32, rank 2 broadcast [4] float32" in finding.summary
    assert "Stack of rank 2" in finding.detail


def test_mismatch_that_is_over_does_not_explain_a_hang() -> None:
    zero = waiting(0, 8)
    zero = dataclasses.replace(zero, calls=(call(2, dtype="int32"), *zero.calls))
    one = elsewhere(1, 7)
    one = dataclasses.replace(one, calls=(call(2), *one.calls))
    # An open call after it may well be its consequence: then it is told.
    assert found(zero, one).what == "mismatch"
    closed = dataclasses.replace(zero, calls=tuple(c for c in zero.calls if c.done))
    assert found(closed, one).what == "code"


def test_groups_of_one_name_but_other_ranks_are_not_mixed_up() -> None:
    """Two pairs may both call their group "7": what one pair does says nothing of the other."""
    finding = found(
        waiting(0, 8, ranks=(0, 1), group="7"),
        elsewhere(1, 7, ranks=(0, 1), group="7"),
        elsewhere(2, 3, ranks=(2, 3), group="7", seconds=0.0),
        elsewhere(3, 3, ranks=(2, 3), group="7", seconds=0.0),
    )
    assert finding.ranks == (1,)
    assert finding.involved == (0, 1)


def test_report_survives_its_journey() -> None:
    report = waiting(0, 8, message=PointToPoint("send", 1), stack=IN_DATA, kernel="x", disk=True)
    assert RankReport.from_json(report.to_json()) == report
