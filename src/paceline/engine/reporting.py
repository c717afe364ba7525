"""What an engine says of itself and of its steps: logged numbers, notes, traffic, memory."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from paceline.engine.internals import HasInternals
from paceline.engine.memory import Memory
from paceline.log_values import Reduce, check_logged, current, log
from paceline.sync.traffic import Traffic
from paceline.world import collectives


class ReportingEngine(HasInternals):
    """The part of ``paceline.Engine`` that logs and reports."""

    _notes: list[str]

    def log(
        self,
        name: str,
        value: Any,
        *,
        count: int | Tensor | None = None,
        reduce: Reduce = "mean",
    ) -> None:
        """Log a number: ``paceline.log`` inside a model or a loss that this engine runs.

        Called elsewhere, such as from a loop, it belongs to the step done last, and every rank
        calls it: their values become one, by default their mean. They are summed with the loss of
        the next step.
        """
        logs = self._internals.context.microbatches.logs
        now = current()
        if now is not None and now.sink is logs:
            log(name, value, count=count, reduce=reduce)
            return
        check_logged(name, value, reduce)
        logs.add_outside(name, value, count, reduce)

    def take_notes(self) -> list[str]:
        """What there is to tell the user since this was last asked, such as what was chosen."""
        notes, self._notes = self._notes, []
        if self._internals.context.average is not None:
            notes += self._internals.context.average.take_notes()
        notes += self._internals.context.freezing.take_notes()
        return (
            notes + self._internals.context.replica.take_notes() + self._internals.sync.take_notes()
        )

    def traffic(self) -> Traffic | None:
        """The bytes of gradients that this rank has sent; ``None`` where they are not counted."""
        return self._internals.sync.traffic()

    def measuring_memory(self) -> contextlib.AbstractContextManager[None]:
        """Measure the steps inside it for ``memory``; on a CPU such a step is a slow one."""
        return self._internals.meter.step()

    def memory(self) -> list[Memory]:
        """What each rank holds, in bytes, by rank: parameters, gradients, optimizer state, ….

        Activations and the peak are known for a step under ``measuring_memory``. Every rank
        must call it.
        """
        return collectives.all_gather_object(self._internals.meter.memory())
