"""Events as TensorBoard files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.errors import MissingExtra
from paceline.events import Event, RunStarted
from paceline.track.scalars import Numbers, scalars
from paceline.track.tracker import Recorder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Recorder):
    """Writes losses, learning rate, speed and metrics to ``folder`` for TensorBoard.

    A resumed run goes on in the same folder: what was recorded past the step from which it goes
    on is struck out, so that each step has one point.
    """

    name: ClassVar[str] = "TensorBoard"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtra("TensorBoard", "tensorboard")
        self._folder = os.fspath(folder)
        self._writer: SummaryWriter | None = None

    def record(self, events: Sequence[Event]) -> None:
        """Write the numbers in ``events``."""
        for event in events:
            if isinstance(event, RunStarted):
                self.finish()
                self._open(purge_step=event.first_step + 1)
            elif isinstance(event, Numbers):
                writer = self._writer or self._open(purge_step=None)
                for tag, value in scalars(event):
                    writer.add_scalar(tag, value, event.step, walltime=event.time)
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=purge_step)
        return self._writer
