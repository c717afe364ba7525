"""Events of a made-up run, for tests of what reads them."""

from __future__ import annotations

import dataclasses

from paceline.events import EvalDone, Event, RunFinished, RunStarted, StepDone
from paceline.track import Recorder


def started(first: int = 0) -> RunStarted:
    """The run starts, or goes on after step ``first``."""
    return RunStarted(
        layout="dp=2",
        world_size=2,
        device="cpu",
        precision="fp32",
        global_batch=32,
        parameters=1000,
        samples_per_epoch=100,
        total_steps=6,
        first_step=first,
    )


def step(number: int, loss: float = 0.5) -> StepDone:
    """One step."""
    return StepDone(
        step=number,
        epoch=0,
        loss=loss,
        lr=0.1,
        samples=8,
        seconds=0.5,
        grad_norm=number / 2,
    )


def steps(first: int, last: int, *, scale: float = 1.0) -> list[Event]:
    """Steps whose loss is their number times ``scale``."""
    return [step(number, scale * number) for number in range(first, last + 1)]


def evaluated(step: int, **metrics: float) -> EvalDone:
    """An evaluation after ``step``."""
    return EvalDone(step=step, epoch=0, metrics=metrics, samples=9, seconds=1.0)


def finished(reason: str = "done") -> RunFinished:
    """The run has ended by itself."""
    return RunFinished(reason=reason, step=6, epoch=0, samples=48, seconds=3.0)


def at(moment: float, event: Event) -> Event:
    """``event`` as it happened at ``moment``."""
    return dataclasses.replace(event, time=moment)


def feed(recorder: Recorder, *events: Event) -> None:
    """Hand ``events`` to a recorder, which has no trouble with them, and close it."""
    troubles: list[str] = []
    recorder.on_trouble = troubles.append
    for event in events:
        recorder.handle(event)
    recorder.close()
    assert troubles == []
