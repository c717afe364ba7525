"""Events of training itself: the run, its steps, evaluations and epochs."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.events.event import Event, Seconds


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training begins, or goes on from ``first_step`` when a checkpoint was resumed."""

    layout: str
    world_size: int
    device: str
    precision: str
    global_batch: int | None
    parameters: int
    samples_per_epoch: int | None
    total_steps: int | None
    first_step: int = 0


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step; ``loss`` is the mean over the global batch, ``step`` counts from 1."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples: int
    seconds: Seconds
    grad_norm: float | None = None
    skipped: bool = False
    logged: dict[str, float] = field(default_factory=dict)
    """What model and loss have logged, by name, over the global batch."""


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """Numbers that callbacks or a loop have logged after ``step``, by name, over all ranks."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MediaLogged(Event):
    """An image, a histogram or a text (``what``) that was logged after ``step``.

    It is in ``file``, a path in the run's folder; trackers are given the whole path.
    """

    step: int
    name: str
    what: str
    file: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class EvalDone(Event):
    """One pass over data, in a run its validation data.

    ``metrics`` holds ``loss``, the user's and the logged.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    samples: int
    seconds: Seconds
    data: str = "validation"
    """What was evaluated; empty for other data than the run's own."""


@dataclass(frozen=True, kw_only=True)
class PhaseProgress(Event):
    """How far what comes between steps is: when it begins, and about once a second.

    ``phase`` is ``evaluation``, ``prediction`` or ``checkpoint``; ``done`` of ``total`` batches are
    through, where it goes by batches and their number is known.
    """

    phase: str
    step: int
    done: int = 0
    total: int | None = None
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochDone(Event):
    """The end of an epoch; ``loss`` is the sample-weighted mean over its steps.

    ``logged`` is what model and loss have logged in it, made one over all its steps.
    """

    step: int
    epoch: int
    loss: float
    samples: int
    seconds: Seconds
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Baseline(Event):
    """The validation loss of something simpler on the same data, to hold the run's against."""

    name: str
    loss: float


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event):
    """NaN or Inf in the ``what`` (loss or gradients) of some ranks; ``action`` is stop or skip."""

    step: int
    what: str
    ranks: list[int]
    action: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Something a person should read: ``level`` is ``info`` or ``warning``."""

    message: str
    level: str = "info"


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run ended by itself; ``reason`` is ``done``, ``stopped`` or ``interrupted``."""

    reason: str
    step: int
    epoch: int
    samples: int
    seconds: Seconds
    metrics: dict[str, float] = field(default_factory=dict)
