"""Saving and loading the state of a run."""

from paceline.checkpoint.interim import BEST, latest, read, steps, write, write_best

__all__ = ["BEST", "latest", "read", "steps", "write", "write_best"]
