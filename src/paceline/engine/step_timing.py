"""Where the time of a few steps goes, by phase, on this rank.

The marks are always there (``world.pulse``). A clock adds, for the steps it is given to, what the
marks alone do not tell: when this rank's own gradients were done, so that the rest of the backward
pass is waiting for others; and on a GPU the time of the stream instead of the host's, which runs
ahead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.diagnose.pulse import PHASES, Pulse


class StepClock(Protocol):
    """Measures from ``start`` to ``stop``; the engine has it as ``clock`` in between."""

    def start(self) -> None:
        """Measure from now on."""

    def stop(self) -> None:
        """Measure no more."""

    def read(self) -> dict[str, float]:
        """The seconds by phase. On a GPU it waits until the GPU is through with the steps."""

    def own_gradients(
        self, parameters: Sequence[nn.Parameter]
    ) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass: what follows the last of ``parameters``' gradients is waiting."""


def make_clock(pulse: Pulse, device: torch.device) -> StepClock:
    """The clock for a rank on ``device``."""
    return StreamClock(pulse, device) if device.type == "cuda" else HostClock(pulse)


class HostClock:
    """By the host's clock: on a CPU, what the thread does is what takes the time."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._spent: dict[str, float] = {}

    def start(self) -> None:
        """Measure from now on."""
        self._pulse.take_spent()

    def stop(self) -> None:
        """Measure no more."""
        self._spent = self._pulse.take_spent()

    def read(self) -> dict[str, float]:
        """The seconds by phase."""
        return by_phase(self._spent)

    @contextlib.contextmanager
    def own_gradients(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Note when the last gradient is there."""
        last: float | None = None

        def note(parameter: Tensor) -> None:
            nonlocal last
            last = time.perf_counter()

        with _after_each_gradient(parameters, note):
            yield
        if last is not None:
            self._pulse.enter("waiting", at=last)


class StreamClock:
    """By events on the GPU's stream, read when they have long passed."""

    def __init__(self, pulse: Pulse, device: torch.device) -> None:
        self._pulse, self._device = pulse, device
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def start(self) -> None:
        """Measure from now on."""
        self._marks = []
        self._pulse.listener = self._mark
        self._mark(self._pulse.phase)

    def stop(self) -> None:
        """Measure no more."""
        self._mark("")
        self._pulse.listener = None

    def read(self) -> dict[str, float]:
        """The seconds by phase: how long the stream was busy with it, or stood still in it."""
        self._marks[-1][1].synchronize()
        spent: dict[str, float] = {}
        for (phase, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            # Gradients may be done before what was put on the stream ahead of them is marked.
            seconds = max(begun.elapsed_time(ended), 0.0) / 1000
            spent[phase] = spent.get(phase, 0.0) + seconds
        return by_phase(spent)

    @contextlib.contextmanager
    def own_gradients(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Mark the stream at each gradient: the last mark stays."""
        event = _event()
        marked = False

        def note(parameter: Tensor) -> None:
            nonlocal marked
            marked = True
            event.record(torch.cuda.current_stream(self._device))

        with _after_each_gradient(parameters, note):
            yield
        if marked:
            self._marks.append(("waiting", event))

    def _mark(self, phase: str) -> None:
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))


def by_phase(spent: Mapping[str, float]) -> dict[str, float]:
    """``spent`` by the phases of a step; whatever is none of them is ``other``."""
    phases = dict.fromkeys(PHASES, 0.0)
    for phase, seconds in spent.items():
        phases[phase if phase in phases else "other"] += seconds
    return phases


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@contextlib.contextmanager
def _after_each_gradient(parameters: Sequence[nn.Parameter], note: _Note) -> Iterator[None]:
    """Call ``note`` whenever a gradient of ``parameters`` is in its place."""
    handles = [p.register_post_accumulate_grad_hook(note) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Note(Protocol):
    def __call__(self, parameter: Tensor, /) -> None: ...
