"""Events as TensorBoard files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import MissingExtra
from paceline.events import Event, MediaLogged, RunStarted
from paceline.track.media import histogram_of, image_of, text_of
from paceline.track.scalars import Numbers, scalars
from paceline.track.tracker import Recorder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Recorder):
    """Writes losses, learning rate, speed, metrics and media to ``folder`` for TensorBoard.

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
            elif isinstance(event, MediaLogged):
                _show(self._writer or self._open(purge_step=None), event)
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


def _show(writer: SummaryWriter, event: MediaLogged) -> None:
    """An image, a histogram or a text."""
    when: Any = {"global_step": event.step, "walltime": event.time}
    if event.what == "image":
        from tensorboard.compat.proto.summary_pb2 import Summary

        # As it is: torch's add_image would decode it and encode it again, which needs PIL.
        data = image_of(event)
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        image = Summary.Image(
            encoded_image_string=data,
            width=width,
            height=height,
            colorspace={0: 1, 2: 3, 6: 4}[data[25]],  # channels, by what PNG calls them
        )
        summary = Summary(value=[Summary.Value(tag=event.name, image=image)])
        writer.file_writer.add_summary(summary, **when)  # type: ignore[attr-defined]
    elif event.what == "text":
        writer.add_text(event.name, text_of(event), **when)
    else:
        found = histogram_of(event)
        writer.add_histogram_raw(
            event.name,
            min=found.edges[0],
            max=found.edges[-1],
            num=sum(found.counts),
            sum=found.sum,
            sum_squares=found.sum_squares,
            bucket_limits=found.edges[1:],
            bucket_counts=found.counts,
            **when,
        )
