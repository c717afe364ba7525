"""Which Paceline this is."""

__version__ = "0.6.0"
