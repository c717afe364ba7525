"""Images, histograms and texts as trackers read them: files that an event names."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.events import Event, MediaLogged
from paceline.untrusted import MIB, parse_json, read_bytes

_MOST_BYTES = 128 * MIB


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` values lie from ``edges[i]`` to ``edges[i + 1]``.

    ``sum`` and ``sum_squares`` are exact; ``not_finite`` values are in no bin.
    """

    edges: list[float]
    counts: list[float]
    sum: float
    sum_squares: float
    not_finite: float = 0.0


def located(event: Event, folder: str | os.PathLike[str] | None) -> Event:
    """The event as a tracker gets it: the file in it by its whole path."""
    if isinstance(event, MediaLogged) and folder is not None:
        return dataclasses.replace(event, file=str(Path(folder) / event.file))
    return event


def image_of(event: MediaLogged) -> bytes:
    """The PNG file that ``event`` tells of."""
    return read_bytes(Path(event.file), _MOST_BYTES)


def text_of(event: MediaLogged) -> str:
    """The text that ``event`` tells of."""
    return read_bytes(Path(event.file), _MOST_BYTES).decode("utf-8", "replace")


def histogram_of(event: MediaLogged) -> Histogram:
    """The histogram that ``event`` tells of."""
    found: Any = parse_json(read_bytes(Path(event.file), _MOST_BYTES))
    return Histogram(**found)
