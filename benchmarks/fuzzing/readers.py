"""Everything that reads the events of a run, called as the launcher and a notebook call it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from paceline.cli.console import say
from paceline.events import Event
from paceline.track.bar import Bar
from paceline.track.follow import Tail
from paceline.track.progress import Progress
from paceline.track.scalars import scalars
from paceline.track.summary import Summary
from paceline.trainer.history import History

_MOST_READS = 100


def read_all(run: Path) -> None:
    """History, summary, progress as lines and as a bar, curves. An ``OSError`` may be."""
    tail = Tail(run)
    told: list[Event] = []
    for _ in range(_MOST_READS):
        if not (events := tail.read()):
            break
        told += events
    lines = Progress(io.StringIO())
    bar = Bar(io.StringIO())
    for event in told:
        lines.handle(event)
        scalars(event)
        bar.say(repr(event))
    lines.close()
    with contextlib.suppress(OSError):  # a folder where the file should be, no rights
        repr(History.read(run))
        for line in Summary.read(run).lines():
            say(line)  # as the command line does
