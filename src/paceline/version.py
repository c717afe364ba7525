"""Which Paceline this is."""

__version__ = "0.2.0"
