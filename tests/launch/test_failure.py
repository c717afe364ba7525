"""Which rank is blamed for a failed run, and in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.launch.failure import (
    RankExit,
    culprit,
    ending_of,
    explain,
    how_it_ended,
    log_tail,
)


def rank_exit(rank: int, *, code: int = 1, time: float = 0.0, **more: object) -> RankExit:
    return RankExit(rank=rank, exit_code=code, time=time, log=Path(f"rank{rank}.log"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exits", "blamed"),
    [
        pytest.param(
            [rank_exit(0, time=2.0, summary="ValueError: a"), rank_exit(1, time=1.0)],
            1,
            id="the earliest",
        ),
        pytest.param(
            [rank_exit(0, time=1.0, lost_peer=True), rank_exit(1, time=1.2, summary="KeyError: x")],
            1,
            id="an error of its own before a lost peer, though recorded later",
        ),
        pytest.param(
            [rank_exit(0, time=1.0, lost_peer=True), rank_exit(1, time=1.1, code=-9)],
            1,
            id="a killed rank before a lost peer",
        ),
        pytest.param(
            [rank_exit(0, time=0.5, code=-15, ended_by_agent=True), rank_exit(1, time=1.0)],
            1,
            id="not the one that was told to end",
        ),
        pytest.param(
            [rank_exit(2, time=1.0, lost_peer=True), rank_exit(1, time=1.5, lost_peer=True)],
            2,
            id="the first lost peer when there is nothing better",
        ),
        pytest.param([rank_exit(3, code=3), rank_exit(1, code=3)], 1, id="the lowest of equals"),
    ],
)
def test_culprit(exits: list[RankExit], blamed: int) -> None:
    assert culprit(exits).rank == blamed


@pytest.mark.parametrize(
    ("exit_", "reason"),
    [
        (rank_exit(0, code=3), "exited with code 3"),
        (rank_exit(0, code=-9), "killed by SIGKILL: often the machine ran out of memory"),
        (rank_exit(0, code=-11), "killed by SIGSEGV: a crash in native code"),
        (rank_exit(0, code=-10), "killed by SIGUSR1"),
        (rank_exit(0, code=-250), "killed by signal 250"),
        (rank_exit(0, summary="ValueError: a\nb"), "ValueError: a"),
    ],
)
def test_reason_is_one_line(exit_: RankExit, reason: str) -> None:
    assert exit_.reason == reason


def test_explanation_shows_one_traceback_and_the_log() -> None:
    error = explain(
        [
            rank_exit(0, time=2.0, traceback="Traceback of rank 0", lost_peer=True),
            rank_exit(1, time=1.0, traceback="Traceback of rank 1", summary="ValueError: bad"),
        ],
        nproc=2,
    )
    assert str(error) == (
        "Rank 1 of 2 failed: ValueError: bad\n\nTraceback of rank 1\n\nIts whole log: rank1.log"
    )
    assert (error.rank, error.exit_code, error.traceback) == (1, 1, "Traceback of rank 1")


def test_a_mistake_that_paceline_tells_itself_needs_no_traceback() -> None:
    kinds = ("paceline.errors.TrainingError", "paceline.errors.PacelineError")
    refused = rank_exit(
        1,
        traceback="Traceback of rank 1",
        summary="paceline.errors.TrainingError: compress: no\nmore of it",
        types=kinds,
        from_paceline=True,
    )
    error = explain([refused], nproc=2, no_restart="it would not help", would_recur=True)
    assert str(error) == (
        "Rank 1 of 2 failed: compress: no\nmore of it\n\n"
        "Its whole log, with the traceback: rank1.log"
    )
    assert (error.traceback, error.would_recur) == ("Traceback of rank 1", True)
    unreadable = dataclasses.replace(refused, types=("paceline.errors.CheckpointError",))
    assert "Traceback" not in str(explain([unreadable], nproc=2)).partition("\n\n")[0]
    for theirs in (
        dataclasses.replace(refused, from_paceline=False),
        dataclasses.replace(refused, types=("paceline.errors.WorldError",)),
    ):
        assert "Traceback of rank 1" in str(explain([theirs], nproc=2))


def test_without_a_traceback_the_last_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(50)) + b"\xff last\n\n")
    failed = RankExit(rank=1, exit_code=7, time=0.0, log=log)
    error = explain([failed], nproc=2)
    assert "exited with code 7" in str(error)
    assert "line 49\n\N{REPLACEMENT CHARACTER} last" in str(error)
    assert "line 30\n" not in str(error), "only the end of the log"
    assert error.traceback == log_tail(log)
    silent = RankExit(rank=1, exit_code=7, time=0.0, log=tmp_path / "none.log")
    assert "It wrote nothing." in str(explain([silent], nproc=2))


def test_rank_0_is_not_repeated_when_the_console_has_shown_it(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("already on the console\n")
    failed = RankExit(rank=0, exit_code=7, time=0.0, log=log)
    error = explain([failed], nproc=2, shown=True)
    assert "Its last lines are above." in str(error)
    assert "already on the console" not in str(error)


def test_a_peer_that_left_early_is_named() -> None:
    lost = rank_exit(0, traceback="T", summary="RuntimeError: gone", lost_peer=True)
    assert "Already finished by then: rank 1." in str(explain([lost], nproc=2, finished=[1]))


def test_why_there_is_no_restart_is_said_before_the_log() -> None:
    failed = rank_exit(1, traceback="T", summary="ValueError: bad")
    error = explain([failed], nproc=4, host="node-b", no_restart="it came twice")
    assert str(error) == (
        "Rank 1 of 4 on node-b failed: ValueError: bad\n\nT\n\n"
        "Not started again: it came twice.\n\nIts whole log: rank1.log"
    )


@pytest.mark.parametrize(
    ("exit_", "raised", "mistake", "killed"),
    [
        (rank_exit(0, summary="E: x", types=("app.E", "builtins.Exception")), "E", False, False),
        (
            rank_exit(0, summary="E: x", types=("app.E", "paceline.errors.DataError")),
            "E",
            True,
            False,
        ),
        (rank_exit(0, code=3, types=("builtins.SystemExit",)), "", True, False),
        (rank_exit(0, code=3), "", False, False),
        (rank_exit(0, code=-9), "", False, True),
        (rank_exit(0, code=-11), "", False, False),
        (rank_exit(0, code=-2), "", True, False),
        (rank_exit(0, code=130), "", True, False),
    ],
)
def test_what_a_failure_means_for_a_restart(
    exit_: RankExit, raised: str, mistake: bool, killed: bool
) -> None:
    ending = ending_of(exit_, step=4, moved=True, seconds=1.5)
    assert (ending.kind, ending.step, ending.moved, ending.seconds) == ("failure", 4, True, 1.5)
    assert ending.error == exit_.reason
    assert (ending.raised, ending.users_mistake, ending.killed) == (raised, mistake, killed)


@pytest.mark.parametrize(
    ("code", "last_line", "lost"),
    [
        (
            -6,
            "what(): [PG ID 0 Rank 1] Process group watchdog thread terminated with exception",
            True,
        ),
        (-6, "free(): invalid pointer", False),
        (-9, "Process group watchdog thread terminated with exception", False),
    ],
)
def test_a_rank_that_nccl_aborts_has_lost_a_peer(
    code: int, last_line: str, lost: bool, tmp_path: Path
) -> None:
    log = tmp_path / "rank1.log"
    log.write_text(f"step 3\n{last_line}\n")
    ended = how_it_ended(
        1, code, 2.0, log=log, error_file=tmp_path / "none", first_end=1.0, overdue=False
    )
    assert ended.lost_peer is lost
