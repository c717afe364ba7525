"""Which Paceline this is."""

__version__ = "0.4.0"
