"""Which Paceline this is."""

__version__ = "0.5.0"
