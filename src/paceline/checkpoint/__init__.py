"""Saving and loading the state of a run."""

from paceline.checkpoint.interim import BEST, latest, name_of, read, steps, write, write_best

__all__ = ["BEST", "latest", "name_of", "read", "steps", "write", "write_best"]
