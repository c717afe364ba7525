"""Now and then: where the time of a few steps went on each rank, and who the others waited for."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.diagnose.pulse import PHASES
from paceline.diagnose.stragglers import StragglerFilter, find_straggler
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.engine.step_timing import StepClock, make_clock
from paceline.events import Event, StepSplit
from paceline.sync.deferred_numbers import LAG
from paceline.world import collectives

SPLIT_STEPS = 5
"""How many steps are measured at a time: one alone may have been disturbed."""
_WARM_UP = 2
"""Steps of a process that are never measured: they make the state, and its memory is measured."""


class StepSplits:
    """Measures the last steps of every ``every``, and reports them as events.

    Every rank calls ``after`` after each step; now and then that is a collective.
    """

    def __init__(self, engine: Engine, every: int | None, report: Callable[[Event], None]) -> None:
        self._engine, self._world = engine, engine.world
        self._context = internals_of(engine).context
        self._every, self._report = every, report
        self._steps = min(SPLIT_STEPS, every or SPLIT_STEPS)
        # Events on a GPU's stream are read when the host, which runs ahead, has waited for them.
        self._lag = 0 if engine.device.type == "cpu" else 2
        self._steps_run = 0
        self._running: StepClock | None = None
        self._ended: list[_Ended] = []
        self._told: list[_Told] = []
        self._hosts: list[str] = []
        self._verdicts = StragglerFilter()

    def after(self, step: int) -> None:
        """``step`` is done, and nothing else since."""
        if self._every is None:
            return
        self._steps_run += 1
        if not self._hosts:
            self._hosts = collectives.all_gather_object(socket.gethostname())
        if step % self._every == 0 and self._running is not None:
            self._running.stop()
            self._ended.append(_Ended(step, self._running, gpu_utilisation(self._engine.device)))
            self._running = self._context.clock = None
        if (step + self._steps) % self._every == 0 and self._steps_run >= _WARM_UP:
            self._running = make_clock(self._world.pulse, self._engine.device)
            self._context.clock = self._running
            self._running.start()
        if self._ended and step >= self._ended[0].step + self._lag:
            self._told.append(self._tell(self._ended.pop(0)))
        if self._told and (not self._engine.in_round or step >= self._told[0].step + LAG):
            self._judge(self._told.pop(0))

    def finish(self) -> None:
        """The run ends: hear what is still on its way. A collective."""
        while self._told:
            self._judge(self._told.pop(0))

    def _tell(self, ended: _Ended) -> _Told:
        """Send this rank's times; replicas that train alone do not wait for the others'."""
        spent = ended.clock.read()
        seconds = [spent[phase] / self._steps for phase in PHASES]
        own = torch.tensor([*seconds, ended.busy], dtype=torch.float64)
        if self._world.size == 1:
            return _Told(ended.step, [own], None)
        everyone = [torch.empty_like(own) for _ in range(self._world.size)]
        group = self._world.everyone.cpu_group
        return _Told(ended.step, everyone, dist.all_gather(everyone, own, group, async_op=True))

    def _judge(self, told: _Told) -> None:
        if told.work is not None:
            with self._world.pulse.during("waiting"):
                told.work.wait()
        by_rank = torch.stack(told.everyone)
        phases = {
            phase: [round(seconds, 6) for seconds in by_rank[:, index].tolist()]
            for index, phase in enumerate(PHASES)
        }
        shares = [round(share, 4) for share in by_rank[:, -1].tolist()]
        known = not any(map(math.isnan, shares))
        self._report(
            StepSplit(
                step=told.step,
                steps=self._steps,
                phases=phases,
                gpu_utilisation=shares if known else [],
            )
        )
        layout = self._engine.layout
        stages = [layout.coordinate(rank).pp for rank in range(self._world.size)]
        found = find_straggler(phases, self._hosts, alike=stages, step=told.step)
        if (verdict := self._verdicts.add(found)) is not None:
            self._report(verdict)


def gpu_utilisation(device: torch.device) -> float:
    """The share of the last moments in which ``device`` ran a kernel; NaN if unknown."""
    if device.type != "cuda":
        return math.nan
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError, OSError):  # no nvidia-ml-py, or a driver that does not say
        return math.nan


class _Ended(NamedTuple):
    step: int
    clock: StepClock
    busy: float


class _Told(NamedTuple):
    step: int
    everyone: list[Tensor]
    work: dist.Work | None
