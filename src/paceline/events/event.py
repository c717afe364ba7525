"""What every event has in common: its time, and its form as one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from paceline.record_fields import FINITE, MOMENT, NOT_EMPTY, POSITIVE, read_fields
from paceline.untrusted import parse_json

Seconds = Annotated[float, FINITE]
Steps = Annotated[int, POSITIVE]
Moment = Annotated[float, MOMENT]
ByRank = Annotated[list[int], NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened; ``time`` is seconds since the epoch."""

    time: Moment = field(default_factory=time.time)

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls

    def to_json(self) -> str:
        """The record as one line of JSON, its class name under ``kind``.

        JSON has no NaN or infinity: they become the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
        """
        return json.dumps({"kind": type(self).__name__, **_plain(dataclasses.asdict(self))})

    @staticmethod
    def from_json(line: str | bytes) -> Event | None:
        """The record in ``line``; ``None`` where there is none that this version can read.

        The line may be cut short or be anything else, its kind may be unknown, a field may be
        missing or not of its type.
        """
        try:
            data = parse_json(line)
            cls = Event.kinds.get(kind) if (kind := kind_of(data)) else None
            return None if cls is None else cls(**read_fields(cls, data))
        except ValueError:
            return None


def kind_of(data: Any) -> str:
    """The kind that a record claims to be of; empty where it claims nothing."""
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else ""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
