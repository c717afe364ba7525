"""The story of a run, told from events that were made up."""

from __future__ import annotations

import re

import pytest

from diagnose.made_up_runs import STARTUP, MadeUpLogs, MadeUpRun
from paceline.diagnose.hangs.diagnosis import KINDS
from paceline.diagnose.story import Story, tell
from paceline.diagnose.story.error_rules import HANGS
from paceline.diagnose.story.report import write
from paceline.events import (
    CheckpointFailed,
    EvalDone,
    GaveUp,
    HangOver,
    NodeJoined,
    NodeLeft,
    NonFinite,
    Note,
    PhaseProgress,
    Restarting,
    RunFailed,
    StepSplit,
    Straggler,
)

TRACEBACK = """step 5
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in forward
    raise ValueError("the third batch is cursed")
  File "/venv/lib/python3.11/site-packages/torch/nn.py", line 3, in call
    return f()
ValueError: the third batch is cursed
"""


def run() -> MadeUpRun:
    return MadeUpRun()


def story(made: MadeUpRun, logs: dict[tuple[int, int], str] | None = None, **how: bool) -> Story:
    return tell(made.events, MadeUpLogs(logs or {}), run="runs/x", now=made.clock + 2.0, **how)


def text(told: Story, *, everything: bool = False) -> str:
    return "\n".join(write(told, everything=everything))


# How a run ended.


def test_a_run_that_went_well_is_told_in_three_lines() -> None:
    told = story(run().start().steps(50).save().steps(100).save().finish())
    assert (told.state, told.cause, told.faults, told.resume) == ("done", None, [], "")
    assert write(told) == [
        "runs/x: finished: 100 steps in 1:44, 8 samples/s",
        "Nothing went wrong: no failure, no restart, no hang, no slow rank.",
        "2 checkpoints, the last of step 100: runs/x/checkpoints/step-100",
    ]
    everything = text(told, everything=True)
    assert "steps 1 to 100: loss" in everything
    assert "saved runs/x/checkpoints/step-50 (every, 1.0 kB)" in everything


def test_a_run_between_steps_says_what_it_does() -> None:
    made = run().start().steps(40)
    for done, total, words in ((0, None, "evaluating"), (3, 10, "evaluating (3 of 10 batches)")):
        made.say(PhaseProgress, phase="evaluation", step=40, done=done, total=total)
        headline = write(story(made, running=True))[0]
        assert headline.startswith(f"runs/x: is running, {words}, at step 40 of 100, 8 samples/s")
    made.say(EvalDone, step=40, epoch=0, metrics={"loss": 1.0}, samples=1, seconds=1.0)
    assert "is running, at step 40" in write(story(made, running=True))[0]


def test_a_run_that_is_going_on_says_where_it_is() -> None:
    told = story(run().start().steps(40), running=True)
    assert told.state == "running"
    first, second, third = write(told)
    assert first == (
        "runs/x: is running, at step 40 of 100, 8 samples/s, 1:00 to go; its last event (StepDone) "
        "is 2.0 s old"
    )
    assert second.startswith("Nothing has gone wrong so far")
    assert third == "No checkpoint; the last loss is 1.0000."


def test_a_run_that_goes_on_after_a_fault_tells_of_it() -> None:
    told = story(run().start().steps(40).lose().restart().start(38).steps(45), running=True)
    assert told.state == "running"
    assert told.cause is not None
    assert told.cause.rank == 1
    assert "What went wrong first" in text(told)
    assert told.costs.by_kind["failure"].repeated == 2


def test_a_run_stopped_by_its_user_has_no_cause() -> None:
    told = story(run().start().steps(20).save().finish("interrupted"))
    assert (told.state, told.cause, told.faults) == ("interrupted", None, ["stopped"])
    shown = write(told)
    assert shown[0] == "runs/x: was told to stop at step 20 of 100, and did; step 20 is saved"
    assert shown[-1] == "To go on: paceline train --resume runs/x"


def test_a_run_that_stopped_early_by_its_own_rule_is_fine() -> None:
    told = story(run().start().steps(20).finish("stopped"))
    assert (told.state, told.cause, told.faults) == ("stopped", None, [])
    assert "stopped early by its own rule at step 20 of 100" in text(told)


def test_a_record_without_an_end_is_a_cut_off_run() -> None:
    told = story(run().start().steps(20))
    assert told.state == "cut_off"
    assert told.cause is not None
    assert told.cause.kind == "cut_off"
    assert "Probably the launcher itself was killed" in told.cause.text
    assert not told.cause.certain
    assert "the record of this start ends here, without an end" in text(told)


def test_a_cut_off_run_whose_log_gives_a_reason() -> None:
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    told = story(run().start().steps(20), {(0, 0): "fine\n", (0, 1): log})
    assert told.cause is not None
    assert told.cause.kind == "gpu_memory"
    assert told.cause.log == "logs/0/rank1.log"


# Each kind of fault alone: what is said of it.

FAILURES = {
    "killed without a trace": (
        ("killed by SIGKILL: often the machine ran out of memory", -9, "step 5\n"),
        (
            "memory",
            "Rank 1 on alpha was killed by SIGKILL after step 5. Its log gives no reason; "
            "probably the machine ran out of memory",
        ),
        ("dmesg", "on alpha", "batch.microbatch", "checkpoint_activations"),
    ),
    "killed, and the log knows why": (
        ("killed by SIGKILL", -9, "oom-kill: task python\n"),
        ("memory", "Probably the machine ran out of memory."),
        ("batch.microbatch",),
    ),
    "GPU memory": (
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, ""),
        ("gpu_memory", "The GPU ran out of memory."),
        ("batch.microbatch", "zero=3"),
    ),
    "disk full": (
        ("OSError: [Errno 28] No space left on device", 1, ""),
        ("disk_full", "The disk is full."),
        ("df -h", "checkpoint.keep"),
    ),
    "a bus error": (
        ("killed by SIGBUS", -7, ""),
        ("shared_memory", "Probably shared memory (/dev/shm) or the disk was full."),
        ("--shm-size",),
    ),
    "native code gave up": (
        ("killed by SIGABRT", -6, "terminate called after throwing 'X'\n  what():  it broke\n"),
        ("crash", "Native code gave up: what():  it broke."),
        ("last lines",),
    ),
    "ranks with different shapes": (
        ("killed by SIGABRT", -6, "enforce fail at pair.cc: op.preamble.length <= op.nbytes\n"),
        ("mismatch", "Probably ranks called different collectives, or with different shapes."),
        ("depends on the rank", "paceline verify"),
    ),
    "an exception": (
        ("ValueError: the third batch is cursed", 1, TRACEBACK),
        ("error", "Rank 1 on alpha failed after step 5: ValueError: the third batch is cursed."),
        ("traceback", "/home/me/train.py:12", "in step 6 (positions 40 to 47 in the order of"),
    ),
    "a mistake": (
        ("paceline.errors.DataError: the batch has no targets", 1, ""),
        ("mistake", "DataError: the batch has no targets."),
        ("put right what the message says",),
    ),
    "a package that is not there": (
        ("ModuleNotFoundError: No module named 'foo'", 1, ""),
        ("missing_package", "cannot be imported"),
        ("on every machine",),
    ),
    "an exit": (
        ("exited with code 3", 3, "bye\n"),
        ("exit", "something in it called sys.exit or os._exit"),
        ("last lines",),
    ),
    "a loader's process": (
        ("RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", 1, ""),
        ("loader_worker", "a process that reads data was killed"),
        ("data.workers",),
    ),
    "told to end": (
        ("killed by SIGTERM", -15, ""),
        ("told_to_end", "told this rank to end"),
        ("SIGTERM on alpha",),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_said_of_a_failure(name: str) -> None:
    (error, code, log), (kind, says), advice = FAILURES[name]
    made = run().start().steps(5).lose(error=error, exit_code=code).give_up("it is over")
    told = story(made, {(0, 1): log})
    assert told.state == "gave_up"
    cause = told.cause
    assert cause is not None
    assert (cause.kind, cause.rank, cause.host, cause.step) == (kind, 1, "alpha", 5)
    assert says.lower() in cause.text.lower()
    for part in advice:
        assert part in cause.advice
    assert cause.certain == ("robably" not in cause.text and code >= 0)
    assert told.ended_by is None
    shown = text(told)
    assert "Root cause" in shown
    assert "failed at step 5 of 100 and gave up: it is over; nothing is saved" in shown


def test_a_run_of_an_older_version_names_the_rank_that_failed() -> None:
    """Without RankLost and GaveUp, as runs wrote it before there were any."""
    made = run().start().steps(5).say(RunFailed, rank=0, error="ValueError: no", exit_code=1)
    told = story(made, {(0, 0): TRACEBACK})
    assert told.state == "failed"
    assert told.cause is not None
    assert told.cause.text == "Rank 0 failed after step 5: ValueError: no."
    assert told.cause.log == "logs/0/rank0.log"
    assert "the third batch is cursed" in told.cause.shown


def test_a_rank_that_lost_its_peer_is_not_the_cause_if_the_peer_says_why() -> None:
    made = run().start().steps(5)
    made.lose(rank=0, error="RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer")
    peer = "torch.OutOfMemoryError: CUDA out of memory\n"
    told = story(made.give_up(), {(0, 0): "", (0, 1): peer})
    assert told.cause is not None
    assert told.cause.kind == "gpu_memory"
    assert told.cause.log == "logs/0/rank1.log"
    alone = story(made, {(0, 0): ""})
    assert alone.cause is not None
    assert alone.cause.kind == "lost_peer"


def test_the_same_error_at_the_same_step_points_to_its_samples() -> None:
    error = "ValueError: the third batch is cursed"
    made = run().start().steps(9).lose(error=error, exit_code=1).restart()
    made.start(8).steps(9).lose(error=error, exit_code=1).give_up("the same error came again")
    told = story(made)
    assert told.cause is not None
    assert told.cause.kind == "input"
    # 64 samples an epoch, 8 a step: step 10 is the second of epoch 2.
    assert "It came 2 times, at the same step with the same error." in told.cause.text
    assert "input of step 10 (positions 8 to 15 in the order of epoch 2)" in told.cause.text
    assert "look at these samples" in told.cause.advice
    assert told.ended_by is None


# NaN, disks, checkpoints.


def nan(step: int, ranks: list[int], action: str = "stop") -> dict[str, object]:
    return dict(step=step, what="loss", ranks=ranks, action=action, detail="the loss is nan")


def test_nan_on_one_rank_is_probably_a_sample() -> None:
    made = run().start().steps(8).say(NonFinite, **nan(9, [1]))
    told = story(made.lose(error="NonFiniteError: step 9", exit_code=1).give_up())
    assert told.cause is not None
    assert told.cause.kind == "nonfinite"
    assert told.cause.text == (
        "NaN or Inf in the loss at step 9 on rank 1 stopped the run. Other ranks were fine: "
        "probably a sample."
    )
    assert "positions 0 to 7 in the order of epoch 2" in told.cause.advice
    assert "train.nonfinite=skip" in told.cause.advice
    assert told.cause.shown == "the loss is nan"
    assert told.faults == ["nonfinite"]


def test_nan_after_a_rising_loss_is_probably_the_learning_rate() -> None:
    made = run().start().steps(8, growth=2.0).say(NonFinite, **nan(9, [0, 1]))
    told = story(made.say(RunFailed, rank=0, error="NonFiniteError: step 9", exit_code=1))
    assert told.cause is not None
    assert "The loss had risen from 2.0000 to 192.0000" in told.cause.text
    assert "optimizer.lr" in told.cause.advice
    assert "train.clip_norm" in told.cause.advice


def test_nan_in_fp16_is_probably_the_precision() -> None:
    made = run().start(precision="fp16").steps(8).say(NonFinite, **nan(9, [0, 1]))
    told = story(made.say(RunFailed, rank=0, error="NonFiniteError: step 9", exit_code=1))
    assert told.cause is not None
    assert "precision=bf16" in told.cause.advice


def test_skipped_steps_of_a_run_that_finished() -> None:
    made = run().start().steps(9).say(NonFinite, **nan(9, [1], "skip")).steps(100).finish()
    told = story(made)
    assert told.state == "done"
    assert told.cause is not None
    assert told.cause.text == "NaN or Inf in the loss at step 9 on rank 1: the step was left out."
    assert "Worth knowing" in text(told)


FULL = "cannot write runs/x/checkpoints: No space left on device. Free some space."


def test_a_full_disk_that_the_run_survived() -> None:
    made = run().start().steps(10).say(CheckpointFailed, step=10, reason="every", error=FULL)
    told = story(made.steps(100).save().finish())
    assert told.state == "done"
    assert told.cause is not None
    assert (told.cause.kind, told.cause.step) == ("disk_full", 10)
    assert re.search(r"step 10 +NOT saved", text(told))


def test_a_full_disk_that_ended_the_run_showed_before() -> None:
    made = run().start().steps(10).say(CheckpointFailed, step=10, reason="every", error=FULL)
    made.steps(20).lose(rank=0, error=f"paceline.errors.CheckpointError: {FULL}", exit_code=1)
    told = story(made.give_up())
    assert told.cause is not None
    assert told.cause.kind == "disk_full"
    assert "The first sign was the checkpoint of step 10, which was not saved." in told.cause.text


def test_a_damaged_checkpoint_that_was_stepped_over() -> None:
    made = run().start().steps(20).finish("interrupted")
    tried = [("checkpoint", 20, "bad hash"), ("checkpoint", 10, "")]
    told = story(made.start(10, tried=tried).steps(100).finish())
    assert told.state == "done"
    assert told.cause is not None
    assert told.cause.kind == "damaged"
    assert told.cause.text == (
        "Checkpoint, step 20, could not be used and was stepped over: bad hash."
    )
    assert told.costs.by_kind["stopped"].repeated == 10
    shown = text(told)
    assert "cannot resume from checkpoint, step 20: bad hash" in shown
    assert "resuming from checkpoint, step 10 (0.1 s)" in shown


def test_rungs_that_are_simply_not_there_are_no_trouble() -> None:
    tried = [("memory", None, "there is no snapshot"), ("memory", 4, "stepped over: newer")]
    told = story(run().start(tried=tried).steps(100).finish())
    assert told.cause is None
    assert not any(chapter.trouble for chapter in told.chapters)


# Hangs and slow ranks.


def test_every_kind_of_hang_has_its_advice() -> None:
    assert set(HANGS) == set(KINDS)


def test_a_hang_that_was_restarted_shows_the_whole_report() -> None:
    made = run().start().steps(10).hang("data").hang("data", action="restart")
    made.lose(error="hung", cause="hang", exit_code=None).restart(reason="hang")
    told = story(made.start(10).steps(100).finish())
    assert told.faults == ["hang"]
    assert told.cause is not None
    assert told.cause.text == (
        "The run stood still after step 10, for 1:00: rank 1 is missing from all_reduce 7."
    )
    assert "data.workers" in told.cause.advice
    assert "rank 1: in train.py:12 work()" in told.cause.shown
    assert text(told).count("rank 1: in train.py:12 work()") == 1
    hangs = told.costs.by_kind["hang"]
    assert (hangs.faults, hangs.repeated) == (1, 0)
    assert hangs.seconds == pytest.approx(120 + STARTUP + 1.0)


def test_a_hang_that_went_over_by_itself() -> None:
    made = run().start().steps(10).hang().say(HangOver, after=5.0, step=10, seconds=65.0)
    told = story(made.steps(100).finish())
    assert told.state == "done"
    assert told.faults == []
    assert told.cause is not None
    assert told.cause.text.startswith("The run stood still for 1:05, then went on by itself")
    assert told.costs.by_kind["standstill"].seconds == 65.0
    assert "moving again, after 1:05" in text(told)


def test_different_calls_that_killed_a_rank_are_the_cause() -> None:
    made = run().start().steps(10).hang("mismatch", seconds=0.0)
    made.lose(error="killed by SIGABRT", exit_code=-6)
    told = story(made.give_up())
    assert told.faults == ["failure"]
    assert told.cause is not None
    assert told.cause.kind == "mismatch"
    assert told.cause.text == (
        "Rank 1 is missing from all_reduce 7. Rank 1 on alpha was killed by SIGABRT after step 10."
    )
    assert "depends on the rank" in told.cause.advice
    assert "rank 1: in train.py:12 work()" in told.cause.shown


def test_different_calls_without_a_standstill_cost_no_time() -> None:
    told = story(run().start().steps(10).hang("mismatch", seconds=0.0).steps(100).finish())
    assert told.state == "done"
    assert told.cause is not None
    assert (told.cause.kind, told.cause.text) == (
        "mismatch",
        "Rank 1 is missing from all_reduce 7.",
    )
    assert told.costs.lost == 0


def test_a_hang_that_the_user_ended_is_the_cause() -> None:
    told = story(run().start().steps(10).hang().finish("interrupted"))
    assert told.faults == ["hang"]
    assert told.state == "failed"


def test_a_hang_that_lasts_is_told_of_a_running_run() -> None:
    told = story(run().start().steps(10).hang(), running=True)
    assert told.state == "running"
    assert told.cause is not None
    assert told.cause.kind == "hang"


def slow(made: MadeUpRun, step: int, seconds: float) -> MadeUpRun:
    phases = {"data": [0.01, seconds], "forward": [0.4, 0.4]}
    return made.say(StepSplit, step=step, steps=10, phases=phases)


def test_a_slow_rank_is_told_once_and_charged_while_it_lasts() -> None:
    made = run().start()
    for step, seconds in ((10, 0.01), (20, 0.31), (30, 0.31), (40, 0.29), (50, 0.01)):
        slow(made.steps(step), step, seconds)
        if step == 30:
            verdict = dict(rank=1, host="beta", phase="data", factor=1.75, costs=0.3, share=0.3)
            made.say(Straggler, step=30, **verdict)
    told = story(made.steps(100).finish())
    assert told.cause is not None
    assert (told.cause.kind, told.cause.rank, told.cause.host) == ("straggler", 1, "beta")
    assert told.cause.text == (
        "Rank 1 on beta takes 1.8 times as long as the others, most of it in data; they wait "
        "300 ms for it every step (30% of the step)."
    )
    assert "data.workers" in told.cause.advice
    assert told.costs.stragglers == pytest.approx(30 * 0.3), "of steps 11 to 40"
    assert "slow ranks" in text(told)


# Nodes.


def test_a_lost_node_and_its_return() -> None:
    made = run().start(nodes=("alpha", "beta")).steps(10)
    made.lose(rank=2, host="beta", cause="node", error="no sign of life", exit_code=None)
    made.say(NodeLeft, host="beta", reason="lost").restart(0, None, "node_lost")
    made.start(9).steps(30).finish("interrupted").say(NodeJoined, host="beta")
    made.restart(0, None, "node_joined").start(30, nodes=("alpha", "beta")).steps(100).finish()
    told = story(made)
    assert told.state == "done"
    assert told.faults == ["node_lost", "node_joined"]
    assert told.cause is not None
    assert told.cause.kind == "node_lost"
    assert told.cause.host == "beta"
    assert "Probably the machine went down or its network was cut." in told.cause.text
    assert told.costs.by_kind["node_lost"].repeated == 1
    assert told.costs.by_kind["node_joined"].repeated == 0
    assert told.costs.not_running == 0
    shown = text(told)
    assert "in spite of 2 interruptions" in shown
    assert "starting 4 ranks on 2 nodes (alpha, beta)" in shown
    assert "node beta joined" in shown


def test_a_lost_node_that_only_its_peers_can_tell_of() -> None:
    """As launchers write it: the decision first, who is missing when the others have met again."""
    made = run().start(nodes=("alpha", "beta")).steps(10)
    made.say(Restarting, reason="node_lost", detail="beta gave no sign of life for 10 s")
    made.say(NodeLeft, after=3.0, host="beta", reason="lost")
    told = story(made.start(10).steps(100).finish())
    assert told.faults == ["node_lost"]
    assert told.cause is not None
    assert (told.cause.kind, told.cause.host, told.cause.step) == ("node_lost", "beta", 10)
    assert told.costs.by_kind["node_lost"].seconds == pytest.approx(3.0 + STARTUP + 1.0)
    assert "(node lost): beta gave no sign of life for 10 s" in text(told)


def test_a_machine_that_was_taken_away_is_nobodys_fault() -> None:
    made = run().start(nodes=("alpha", "beta")).steps(10).save().finish("interrupted")
    made.say(NodeLeft, host="beta", reason="preempted").restart(1, None, "preemption")
    told = story(made.start(10).steps(100).finish())
    assert (told.state, told.cause, told.faults) == ("done", None, ["preemption"])
    assert told.costs.by_kind["preemption"].seconds == pytest.approx(STARTUP + 1.0)
    assert "node beta was told to leave" in text(told)


def test_machines_taken_away_too_often_end_the_run_in_order() -> None:
    made = run().start().steps(10).save().finish("interrupted")
    told = story(made.say(GaveUp, reason="machines were taken from the run 3 times"))
    assert (told.state, told.cause, told.faults) == ("gave_up", None, ["preemption"])
    assert "gave up: machines were taken from the run 3 times; step 10 is saved" in text(told)


def test_a_hang_that_no_rank_is_to_blame_for() -> None:
    made = run().start().steps(10).lose(rank=-1, error="hung", cause="hang", exit_code=None)
    told = story(made.give_up())
    assert told.cause is not None
    assert told.cause.rank is None
    assert "rank -1" not in text(told)


# Several things after each other.


def test_killed_then_hung_then_given_up_names_both() -> None:
    made = run().start().steps(10).save().steps(12).lose().restart(1, 1)
    made.start(10).steps(20).hang(action="restart")
    made.lose(error="hung", cause="hang", exit_code=None)
    told = story(made.give_up("1 restart did not help"))
    assert told.faults == ["failure", "hang"]
    assert told.cause is not None
    assert told.ended_by is not None
    assert (told.cause.kind, told.cause.step) == ("memory", 12)
    assert (told.ended_by.kind, told.ended_by.step) == ("hang", 20)
    shown = text(told)
    assert shown.index("Root cause") < shown.index("What ended it") < shown.index("What happened")
    failure, hang = told.costs.by_kind["failure"], told.costs.by_kind["hang"]
    # From step 12 to the first new one: up again, two steps repeated, one new.
    assert (failure.seconds, failure.repeated) == (pytest.approx(STARTUP + 3.0), 2)
    assert hang.seconds == pytest.approx(60.0)
    assert told.costs.saving == 0.25


def test_a_recovered_fault_long_ago_is_not_why_the_run_ended() -> None:
    made = run().start().steps(10).lose().restart(1, 3).start(10).steps(60)
    made.say(NonFinite, **nan(61, [1])).lose(error="NonFiniteError", exit_code=1)
    told = story(made.give_up("NonFiniteError does not go away by itself"))
    assert told.faults == ["failure", "nonfinite"]
    assert told.cause is not None
    assert told.cause.kind == "nonfinite"
    assert told.ended_by is None


def test_what_came_of_a_fault_before_anything_new_was_done_belongs_to_it() -> None:
    made = run().start(nodes=("alpha", "beta")).steps(10)
    made.lose(rank=2, host="beta", cause="node", error="no sign of life", exit_code=None)
    made.restart(0, None, "node_lost").start(8).steps(9).hang("network", action="stop")
    made.lose(error="hung", cause="hang", exit_code=None)
    told = story(made.give_up("the run is to stop"))
    assert told.cause is not None
    assert told.ended_by is not None
    assert (told.cause.kind, told.ended_by.kind) == ("node_lost", "hang")
    node, hang = told.costs.by_kind["node_lost"], told.costs.by_kind["hang"]
    # The node's time ends where the hang was found, and is not counted twice.
    assert node.seconds + hang.seconds == pytest.approx(STARTUP + 1.0 + 60.0)
    assert node.repeated == 1


def test_time_in_which_nobody_resumed_it_is_no_loss() -> None:
    made = run().start().steps(10).lose().give_up()
    made.clock += 3600.0
    told = story(made.start(8).steps(100).finish())
    assert told.costs.not_running == pytest.approx(3600.0)
    assert told.costs.by_kind["failure"].seconds == pytest.approx(STARTUP + 3.0)
    assert told.costs.total == pytest.approx(2 * STARTUP + 102.0)
    assert "until somebody resumed it" in text(told)


def test_a_launcher_that_vanished_and_was_started_again() -> None:
    told = story(run().start().steps(10).start(5).steps(100).finish())
    assert told.faults == ["cut_off"]
    assert told.state == "done"
    assert told.costs.by_kind["cut_off"].repeated == 5


def test_a_trainer_without_a_launcher_has_worlds_too() -> None:
    first = [e for e in run().start().steps(10).events if type(e).__name__ != "RanksStarted"]
    again = [e for e in run().start(5).steps(100).finish().events if e not in first]
    told = tell([*first, *(e for e in again if type(e).__name__ != "RanksStarted")], run="x")
    assert told.faults == ["cut_off"]
    assert told.facts.starts == 2


def test_a_hundred_faults_are_told_by_their_beginning_and_end() -> None:
    made = run()
    for number in range(100):
        made.start(number).steps(number + 1).lose().restart(1, 3)
    told = story(made.start(100).finish())
    assert told.faults == ["failure"] * 100
    shown = write(told)
    assert len(shown) < 90
    assert any("more: --all shows them" in line for line in shown)
    assert len(write(told, everything=True)) > 400


def test_warnings_are_part_of_the_story_and_other_notes_of_the_whole_one() -> None:
    made = run().start().say(Note, message="odd", level="warning").say(Note, message="by the way")
    told = story(made.steps(5).lose().give_up())
    assert "! " in next(line for line in write(told) if line.endswith("odd"))
    assert "by the way" not in text(told)
    assert "by the way" in text(told, everything=True)


@pytest.mark.parametrize("rank", [-5, 2, 10**12])
def test_a_straggler_of_whose_rank_no_split_knows(rank: int) -> None:
    run = MadeUpRun().start()
    run.say(StepSplit, step=1, steps=1, phases={"data": [0.1, 0.2]})
    run.say(Straggler, step=1, rank=rank, host="x", phase="data", factor=2.0, costs=0.5, share=0.1)
    assert tell(run.events).costs.stragglers == 0.5
