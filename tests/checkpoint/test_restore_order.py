"""Which state is gone on from: a policy, tested without processes, memory or disks."""

from __future__ import annotations

import pytest

from paceline.checkpoint.restore_order import RestoreAttempt, RestoreCandidate, restore_newest
from paceline.errors import CheckpointError

OWN, PARTNER, DISK = "own memory", "partner memory", "checkpoint"


class Ladder:
    """Rungs of which some are broken; notes which were tried, and what was reported."""

    def __init__(self, *rungs: tuple[str, int], broken: tuple[tuple[str, int], ...] = ()) -> None:
        self.tried: list[tuple[str, int]] = []
        self.reports: list[RestoreAttempt] = []
        self.broken = broken
        self.rungs = [self.rung(name, step) for name, step in rungs]

    def rung(self, name: str, step: int) -> RestoreCandidate[str]:
        def restore() -> str:
            self.tried.append((name, step))
            if (name, step) in self.broken:
                raise CheckpointError(f"{name} of step {step} is damaged.")
            return f"{name} {step}"

        return RestoreCandidate(name, step, restore)

    def restore_newest(self) -> str | None:
        return restore_newest(self.rungs, self.reports.append)

    @property
    def said(self) -> list[tuple[str, int | None, bool]]:
        return [(tried.rung, tried.step, tried.ok) for tried in self.reports]


EVERYTHING = ((OWN, 12), (PARTNER, 12), (OWN, 11), (PARTNER, 11), (DISK, 10), (DISK, 5))


@pytest.mark.parametrize("broken", range(len(EVERYTHING)))
def test_rungs_are_tried_in_order_until_one_holds(broken: int):
    ladder = Ladder(*EVERYTHING, broken=EVERYTHING[:broken])
    name, step = EVERYTHING[broken]
    assert ladder.restore_newest() == f"{name} {step}"
    assert ladder.tried == list(EVERYTHING[: broken + 1])
    assert ladder.said == [*((n, s, False) for n, s in EVERYTHING[:broken]), (name, step, True)]
    for report, (name, step) in zip(ladder.reports, EVERYTHING[:broken], strict=False):
        assert report.detail == f"{name} of step {step} is damaged."
    assert all(report.seconds >= 0 for report in ladder.reports)


def test_of_one_step_memory_goes_before_disk():
    assert Ladder((OWN, 10), (DISK, 10)).restore_newest() == "own memory 10"
    assert Ladder((OWN, 10), (DISK, 10), broken=((OWN, 10),)).restore_newest() == "checkpoint 10"


def test_memory_older_than_the_newest_checkpoint_is_stepped_over_and_said_so():
    ladder = Ladder((OWN, 15), (PARTNER, 15), (OWN, 14), (DISK, 20), (DISK, 10))
    assert ladder.restore_newest() == "checkpoint 20"
    assert ladder.said == [(OWN, 15, False), (PARTNER, 15, False), (DISK, 20, True)]
    assert "20" in ladder.reports[0].detail
    assert ladder.tried == [(DISK, 20)]


def test_what_was_stepped_over_is_there_when_the_newer_one_fails():
    ladder = Ladder((OWN, 15), (DISK, 20), (DISK, 10), broken=((DISK, 20),))
    assert ladder.restore_newest() == "own memory 15"  # not step 10: that would lose more work
    assert ladder.said == [(OWN, 15, False), (DISK, 20, False), (OWN, 15, True)]


def test_without_a_rung_there_is_nothing():
    ladder = Ladder()
    assert ladder.restore_newest() is None
    assert ladder.reports == []


def test_where_all_rungs_fail_the_run_does_not_begin_again():
    ladder = Ladder((OWN, 3), (DISK, 2), broken=((OWN, 3), (DISK, 2)))
    with pytest.raises(CheckpointError, match=r"step 2 is damaged.*nothing older"):
        ladder.restore_newest()
    assert ladder.said == [(OWN, 3, False), (DISK, 2, False)]


def test_a_rank_that_succeeds_where_another_fails_goes_on_with_it():
    ladder = Ladder((OWN, 3), (DISK, 2))
    others = iter(["Rank 1: no.", None])
    found = restore_newest(
        ladder.rungs, ladder.reports.append, agree=lambda mine: mine or next(others)
    )
    assert found == "checkpoint 2"
    assert [report.detail for report in ladder.reports] == ["Rank 1: no.", ""]


def test_what_is_no_failure_of_a_checkpoint_is_not_swallowed():
    def broken() -> str:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        restore_newest([RestoreCandidate(OWN, 1, broken)], lambda tried: None)
