"""How work and state are spread over a world: pure data, no torch."""

from typing import Any

from paceline.deprecation import warn_of_old_name
from paceline.layout.layout import Coordinate, Layout

__all__ = ["Coordinate", "Layout"]


def __getattr__(name: str) -> Any:
    if name == "Place":
        warn_of_old_name("paceline.layout.Place", "Coordinate")
        return Coordinate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
