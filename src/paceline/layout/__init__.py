"""How work and state are spread over a world: pure data, no torch."""

from paceline.layout.layout import Layout, Place

__all__ = ["Layout", "Place"]
