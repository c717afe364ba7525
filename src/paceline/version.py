"""Which Paceline this is."""

__version__ = "0.3.0"
