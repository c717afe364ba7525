"""Events that measure a run: memory, where a step's time goes, bytes sent, slow ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.events.event import ByRank, Event, Seconds, Steps


@dataclass(frozen=True, kw_only=True)
class MemoryMeasured(Event):
    """Bytes held by each rank, by rank; ``activations`` and ``peak`` are of the measured step."""

    step: int
    parameters: ByRank
    gradients: ByRank
    optimizer: ByRank
    buffers: ByRank
    activations: ByRank
    peak: ByRank
    current: ByRank


@dataclass(frozen=True, kw_only=True)
class StepSplit(Event):
    """Where the time of the ``steps`` steps up to ``step`` went, in mean seconds by rank.

    ``phases`` maps data, forward, backward, waiting, optimizer and other to one number a rank.
    """

    step: int
    steps: Steps
    phases: dict[str, list[float]]
    gpu_utilisation: list[float] = field(default_factory=list)
    """The share of the last moments in which each rank's GPU ran a kernel; empty unless all say."""


@dataclass(frozen=True, kw_only=True)
class WireUsed(Event):
    """The bytes of gradients that each rank sent in the ``steps`` steps up to ``step``.

    Told where they travel in another form, or not after every step. ``bytes_plain`` is what each
    rank would have sent of them as they are, after every step. ``what`` they sent: ``gradients``,
    ``warmup`` (gradients as they are, before compression begins) or ``distances`` (replicas that
    train alone tell each other how far they came).
    """

    step: int
    steps: Steps
    bytes_sent: ByRank
    bytes_plain: ByRank
    what: str = "gradients"


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """A rank for which the others wait: ``costs`` seconds of every step, ``share`` of its time.

    ``phase`` is where it is slow, ``factor`` how much slower than the median of the other ranks.
    """

    step: int
    rank: int
    host: str
    phase: str
    factor: Seconds
    costs: Seconds
    share: Seconds
