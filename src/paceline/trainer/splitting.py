"""Now and then: where the time of a few steps went on each rank, and who the others waited for."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.diagnose.pulse import PHASES
from paceline.diagnose.stragglers import Verdicts, find
from paceline.engine import Engine
from paceline.engine.split import Clock, make_clock
from paceline.events import Event, StepSplit
from paceline.world import collectives

SPLIT_STEPS = 5
"""How many steps are measured at a time: one alone may have been disturbed."""
_WARM_UP = 2
"""Steps of a process that are never measured: they make the state, and its memory is measured."""


class StepSplits:
    """Measures the last steps of every ``every``, and reports them as events.

    Every rank calls :meth:`after` after each step; now and then that is a collective.
    """

    def __init__(self, engine: Engine, every: int | None, report: Callable[[Event], None]) -> None:
        self._engine, self._world = engine, engine.world
        self._every, self._report = every, report
        self._steps = min(SPLIT_STEPS, every or SPLIT_STEPS)
        # Events on a GPU's stream are read when the host, which runs ahead, has waited for them.
        self._lag = 0 if engine.device.type == "cpu" else 2
        self._steps_run = 0
        self._running: Clock | None = None
        self._ended: list[_Ended] = []
        self._hosts: list[str] = []
        self._verdicts = Verdicts()

    def after(self, step: int) -> None:
        """``step`` is done, and nothing else since."""
        if self._every is None:
            return
        self._steps_run += 1
        if step % self._every == 0 and self._running is not None:
            self._running.stop()
            self._ended.append(_Ended(step, self._running))
            self._running = self._engine.clock = None
        if (step + self._steps) % self._every == 0 and self._steps_run >= _WARM_UP:
            self._running = self._engine.clock = make_clock(self._world.pulse, self._engine.device)
            self._running.start()
        if self._ended and step >= self._ended[0].step + self._lag:
            self._exchange(self._ended.pop(0))

    def _exchange(self, ended: _Ended) -> None:
        spent = ended.clock.read()
        own = torch.tensor([spent[phase] / self._steps for phase in PHASES], dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self._world.size)]
        with self._world.pulse.during("waiting"):
            if self._world.size == 1:
                everyone = [own]
            else:
                dist.all_gather(everyone, own, group=self._world.everyone.cpu_group)
            if not self._hosts:
                self._hosts = collectives.all_gather_object(socket.gethostname())
        by_rank = torch.stack(everyone)
        phases = {
            phase: [round(seconds, 6) for seconds in by_rank[:, index].tolist()]
            for index, phase in enumerate(PHASES)
        }
        self._report(StepSplit(step=ended.step, steps=self._steps, phases=phases))
        layout = self._engine.layout
        stages = [layout.place(rank).pp for rank in range(self._world.size)]
        found = find(phases, self._hosts, alike=stages, step=ended.step)
        if (told := self._verdicts.add(found)) is not None:
            self._report(told)


class _Ended(NamedTuple):
    step: int
    clock: Clock
