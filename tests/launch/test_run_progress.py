"""How far a run has come, read from its events."""

from __future__ import annotations

from pathlib import Path

from paceline.events import EventLog, Note, StepDone
from paceline.launch.run_progress import RunProgress


def step(number: int) -> StepDone:
    return StepDone(step=number, epoch=0, loss=1.0, lr=0.1, samples=8, seconds=0.1)


def test_steps_of_the_world_and_of_the_run(tmp_path: Path) -> None:
    steps = RunProgress(tmp_path)
    assert (steps.last(), steps.moved()) == (None, None), "nothing is written yet"
    log = EventLog(tmp_path)
    log.write(Note(message="starting"))
    assert (steps.last(), steps.moved()) == (None, False)
    log.write(step(1))
    log.write(step(2))
    assert (steps.last(), steps.moved()) == (2, True)
    steps.mark()
    assert (steps.last(), steps.moved()) == (2, False), "a new world has done none yet"
    log.write(Note(message='it says "StepDone"'))
    assert (steps.last(), steps.moved()) == (2, False)
    log.write(step(3))
    assert (steps.last(), steps.moved()) == (3, True)
    log.close()


def test_a_step_far_from_the_end_is_found(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(step(7))
    for _ in range(400):
        log.write(Note(message="x" * 500))
    log.close()
    assert RunProgress(tmp_path).last() == 7


def test_a_line_cut_short_by_a_kill_is_no_step(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(step(7))
    log.close()
    with open(log.path, "a") as file:
        file.write(step(8).to_json()[:40])
    assert RunProgress(tmp_path).last() == 7


def test_without_events_nobody_can_tell() -> None:
    steps = RunProgress(None)
    steps.mark()
    assert (steps.last(), steps.moved()) == (None, None)
