"""What a person sees of a run: lines off a terminal, a bar on one."""

from __future__ import annotations

import dataclasses
import io
import os
import pty
import re
import subprocess
import sys

import pytest

from paceline.events import (
    Baseline,
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
    PhaseProgress,
    RankLost,
    RanksStarted,
    Restarting,
    RestoreTried,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
    StepSplit,
    Straggler,
)
from paceline.track import Progress
from paceline.track.pace import Pace


def started(total: int | None = 100, first: int = 0) -> RunStarted:
    return RunStarted(
        layout="dp=2",
        world_size=2,
        device="cpu",
        precision="fp32",
        global_batch=32,
        parameters=843_200,
        samples_per_epoch=1000,
        total_steps=total,
        first_step=first,
        time=0.0,
    )


def step(number: int, *, time: float, loss: float = 2.0, skipped: bool = False) -> StepDone:
    return StepDone(
        step=number,
        epoch=0,
        loss=loss,
        lr=0.1,
        samples=32,
        seconds=0.5,
        skipped=skipped,
        time=time,
    )


def lines(*events: Event, close: bool = True) -> list[str]:
    stream = io.StringIO()
    progress = Progress(stream)
    for event in events:
        progress.handle(event)
    if close:
        progress.close()
    return stream.getvalue().splitlines()


def test_a_short_run_shows_its_tenths() -> None:
    shown = lines(started(20), *(step(i, time=0.5 * i) for i in range(1, 21)))
    assert shown[0] == (
        "training 843.2k parameters on 2 ranks (dp=2, cpu, fp32), global batch 32, 20 steps"
    )
    assert shown[1] == "step 1/20: loss 2.0000, 64 samples/s, ETA 0:10"
    assert [line.split(":")[0] for line in shown[1:]] == [
        "step 1/20",
        *(f"step {i}/20" for i in range(2, 21, 2)),
    ]
    assert shown[-1] == "step 20/20: loss 2.0000, 64 samples/s, ETA 0:00"


def test_logged_numbers_stand_beside_the_loss() -> None:
    logged = {"kl": 0.25, "ce": 1.5, "a": 1.0, "b": 2.0}
    shown = lines(started(4), dataclasses.replace(step(1, time=1.0), logged=logged))
    assert shown[1] == (
        "step 1/4: loss 2.0000, kl 0.2500, ce 1.5000, a 1.0000, 64 samples/s, ETA 0:02"
    )


def test_a_long_run_is_reported_by_the_clock() -> None:
    """An hour of steps without a known end: every few seconds at first, then once a minute."""
    shown = lines(started(None), *(step(i, time=float(i)) for i in range(1, 3601)))
    at = [int(re.findall(r"\d+", line)[0]) for line in shown[1:]]
    assert at[:4] == [1, 6, 11, 16]
    assert 60 <= at[-3] - at[-4] <= 73
    assert at[-1] == 3600, "the last step is always shown"
    assert len(at) < 250
    assert shown[1] == "step 1: loss 2.0000, 64 samples/s"


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    shown = lines(started(100, first=60), step(61, time=1.0), step(62, time=2.0), close=False)
    assert shown[0].endswith("100 steps; going on after step 60")
    assert shown[1] == "step 61/100: loss 2.0000, 64 samples/s, ETA 0:20"
    assert len(shown) == 2, "it is at step 62, but 0.62 of the run was not done just now"


def test_a_restart_begins_anew() -> None:
    shown = lines(
        started(10), step(1, time=1.0), step(2, time=2.0), started(10, first=1), step(2, time=60.0)
    )
    assert shown[-1] == "step 2/10: loss 2.0000, 64 samples/s, ETA 0:04", "the gap is no pace"


def test_what_else_happens_is_said() -> None:
    shown = lines(
        RanksStarted(nproc=2),
        Baseline(name="byte unigrams", loss=3.2),
        EvalDone(step=5, epoch=0, metrics={"loss": 1.5, "accuracy": 0.25}, samples=9, seconds=2.0),
        EpochDone(step=6, epoch=0, loss=1.25, samples=100, seconds=9.0),
        CheckpointSaved(step=7, path="runs/[a]/x.pt", bytes=3_200_000, seconds=0.1, reason="end"),
        CheckpointSaved(step=8, path="y.pt", bytes=10, seconds=0.1, reason="best"),
        NonFinite(step=9, what="loss", ranks=[0, 2], action="skip"),
        NonFinite(step=9, what="gradients", ranks=[], action="stop", detail="In layer 3."),
        Note(message="just so"),
        Note(message="careful", level="warning"),
        RunFailed(rank=0, error="x", exit_code=1),
        RunFinished(reason="done", step=9, epoch=0, samples=1, seconds=1.0),
    )
    assert shown == [
        "starting 2 ranks",
        "for comparison, byte unigrams: validation loss 3.2000",
        "step 5: validation loss 1.5000, accuracy 0.2500 (2.0 s)",
        "step 6: epoch 1 done, mean loss 1.2500",
        "step 7: saved runs/[a]/x.pt (end, 3.2 MB)",
        "step 8: saved y.pt (best so far, 10 B)",
        "warning: step 9: NaN or Inf in the loss on ranks 0 and 2; the step was skipped.",
        "warning: step 9: NaN or Inf in the gradients; the run stops. In layer 3.",
        "just so",
        "warning: careful",
    ]


def lost(**changed: object) -> RankLost:
    values = dict(rank=1, host="alpha", cause="failed", error="it broke.", exit_code=1, step=5)
    return RankLost(**{**values, **changed})


def hang(action: str, seconds: float = 60.0) -> HangFound:
    return HangFound(
        step=5,
        seconds=seconds,
        what="data",
        ranks=[1],
        summary="rank 1 is missing",
        detail="rank 1 is missing\nrank 1: …",
        action=action,
    )


def test_what_befalls_ranks_and_machines_is_a_line_each() -> None:
    shown = lines(
        RanksStarted(nproc=2, world_size=4, nodes=["alpha", "beta"], idle=1),
        lost(log="logs/rank1.log"),
        lost(log="logs/rank1.log", told_at_end=True),
        Restarting(reason="failure", detail="rank 1 failed", delay=2.0, used=2, budget=3),
        lost(cause="node", step=None, error="no sign of life"),
        Restarting(reason="node_lost", detail="without beta"),
        lost(cause="hang", rank=-1, error="hung"),
        NodeLeft(host="beta", reason="lost"),
        NodeLeft(host="beta", reason="preempted"),
        NodeJoined(host="beta"),
        hang("wait"),
        hang("restart"),
        hang("wait", seconds=0.0),
        HangOver(step=5, seconds=75.0),
        StepSplit(step=50, steps=50, phases={"data": [0.1, 0.2]}),
        Straggler(step=50, rank=1, host="beta", phase="data", factor=1.5, costs=0.125, share=0.25),
        RestoreTried(rung="memory", step=None, ok=False, detail="nothing there", seconds=0.0),
        RestoreTried(rung="checkpoint", step=8, ok=False, detail="bad hash", seconds=0.1),
        RestoreTried(rung="checkpoint", step=4, ok=True, detail="", seconds=0.1),
        GaveUp(reason="3 restarts in a row did not help"),
    )
    assert shown == [
        "starting 4 ranks on 2 nodes (alpha, beta), 1 more standing by",
        "warning: step 5: rank 1 on alpha failed: it broke; its log: logs/rank1.log",
        "warning: step 5: rank 1 on alpha failed",
        "all ranks are started again in 2.0 s (failure, restart 2 of 3)",
        "warning: rank 1 on alpha was lost with its node: no sign of life",
        "all ranks are started again (node lost): without beta",
        "warning: step 5: the run hung: hung",
        "warning: node beta was lost",
        "node beta was told to leave",
        "node beta joined",
        "warning: step 5: nothing has moved for 1:00: rank 1 is missing",
        "rank 1: …",
        "warning: step 5: nothing has moved for 1:00: rank 1 is missing; if it goes on, "
        "all ranks are restarted",
        "rank 1: …",
        "warning: step 5: rank 1 is missing",
        "step 5: moving again, after 1:15",
        "warning: step 50: rank 1 on beta is slow in data: the others wait 125 ms a step for it "
        "(25%)",
        "warning: cannot resume from checkpoint, step 8: bad hash",
        "resuming from checkpoint, step 4 (0.1 s)",
        "warning: gave up: 3 restarts in a row did not help",
    ]


def test_odd_losses_are_shown_as_they_are() -> None:
    shown = lines(
        started(3),
        step(1, time=1.0, loss=float("nan"), skipped=True),
        step(2, time=2.0, loss=float("inf")),
        step(3, time=3.0, loss=1e-9),
    )
    assert [line.split(",")[0] for line in shown[1:]] == [
        "step 1/3: loss nan (skipped)",
        "step 2/3: loss inf",
        "step 3/3: loss 1e-09",
    ]


def test_a_closed_stream_is_nobodys_trouble() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.handle(started())
    stream.close()
    progress.handle(step(1, time=1.0))
    progress.handle(step(2, time=20.0))
    progress.close()


ON_A_TERMINAL = """
from paceline.events import *
from paceline.track import Progress
progress = Progress()
progress.handle(RanksStarted(nproc=2))
progress.handle(RunStarted(layout="dp=2", world_size=2, device="cpu", precision="fp32",
                           global_batch=32, parameters=10, samples_per_epoch=9, total_steps=4))
for i in range(1, 5):
    progress.handle(StepDone(step=i, epoch=0, loss=1.5, lr=0.1, samples=32, seconds=0.5))
    if i == 2:
        print("printed by the [red]program[/red]")
        progress.handle(Note(message="a [bold]note[/bold]", level="warning"))
progress.handle(RunFinished(reason="done", step=4, epoch=0, samples=1, seconds=1.0))
progress.handle(Note(message="after the end"))
progress.close()
print("and on")
"""


def on_a_terminal(code: str, **env: str) -> str:
    """What a program shows on a terminal, control sequences left out."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **env},
    ):
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how a terminal says that its program is gone
                break
            if not chunk:
                break
            shown += chunk
    os.close(ours)
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h"), "the cursor comes back"
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", shown.decode())


def test_a_bar_on_a_terminal() -> None:
    shown = on_a_terminal(ON_A_TERMINAL)
    assert "starting 2 ranks" in shown
    assert re.search(r"step 4/4 ━+ loss 1\.5000, 64 samples/s, ETA 0:00", shown)
    # Lines stand above the bar, with brackets that are no markup.
    assert "printed by the [red]program[/red]\r\n" in shown
    assert "warning: a [bold]note[/bold]\r\n" in shown
    assert shown.endswith("after the end\r\nand on\r\n")


def test_an_evaluation_has_a_bar_of_its_own() -> None:
    shown = on_a_terminal(
        """
import time
from paceline.events import *
from paceline.track import Progress
shown = Progress()
shown.handle(RunStarted(layout="dp=1", world_size=1, device="cpu", precision="fp32", global_batch=8,
                        parameters=1, samples_per_epoch=16, total_steps=4, time=0.0))
shown.handle(StepDone(step=3, epoch=1, loss=1.5, lr=0.001, samples=8, seconds=0.5, time=1.0))
shown.handle(PhaseProgress(phase="evaluation", step=3, total=10, time=1.0))
shown.handle(PhaseProgress(phase="evaluation", step=3, done=4, total=10, time=3.0))
time.sleep(1.5)  # several of its refreshes
shown.close()
"""
    )
    assert re.search(
        r"step 3/4 [━╸]+ loss 1\.5000, 16 samples/s, ETA 0:00, epoch 2/2, lr 0\.001", shown
    )
    assert re.search(r"evaluating 4/10 [━╸╺]+ 0:03 to go", shown)


def test_a_long_evaluation_is_shown_by_the_clock() -> None:
    def batches(done: int, *, time: float) -> PhaseProgress:
        return PhaseProgress(phase="evaluation", step=1, done=done, total=30, time=time)

    evaluated = EvalDone(step=1, epoch=0, metrics={"loss": 1.0}, samples=9, seconds=30.0, time=31.0)
    long = [batches(second, time=1.0 + second) for second in range(30)]
    shown = lines(started(), step(1, time=1.0), *long, evaluated)
    assert shown[2:] == [
        "evaluating 10/30, 0:20 to go",
        "evaluating 20/30, 0:10 to go",
        "step 1: validation loss 1.0000 (30 s)",
    ]
    quick = [PhaseProgress(phase="checkpoint", step=n, time=50.0 * n) for n in range(1, 4)]
    between = [
        event for n, saves in enumerate(quick, 1) for event in (saves, step(n, time=60.0 * n))
    ]
    assert all("saving" not in line for line in lines(started(None), *between))


def test_pace_spreads_rare_evaluations_over_the_steps_to_come() -> None:
    """One evaluation of 10 s in a hundred steps: neither forgotten nor taken for every step."""
    pace, now = Pace(window=10), 0.0
    for number in range(1, 202):
        now += 0.5 + (10.0 if number % 100 == 1 and number > 1 else 0.0)
        pace.add(step(number, time=now))
    left = pace.seconds_left(401)
    assert left == pytest.approx(200 * 0.5 + 2 * 10.0)


def test_no_bar_on_a_dumb_terminal() -> None:
    shown = on_a_terminal(ON_A_TERMINAL, TERM="dumb")
    assert "step 4/4: loss 1.5000, 64 samples/s, ETA 0:00\r\n" in shown
    assert "━" not in shown


def test_pace_knows_evaluations_slow_a_run() -> None:
    pace = Pace()
    assert pace.samples_per_second == 0
    assert pace.seconds_left(10) is None
    pace.add(step(1, time=1.0))
    assert pace.seconds_left(11) == pytest.approx(5.0)  # nothing but the step's own time yet
    pace.add(step(2, time=3.0))  # 0.5 s of step, 1.5 s of something else
    assert pace.seconds_left(12) == pytest.approx(20.0)
    assert pace.samples_per_second == pytest.approx(64.0)
    assert pace.seconds_left(None) is None
    assert pace.seconds_left(1) == 0
