"""Saving and loading the state of a run."""

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.save import load, save

__all__ = ["Checkpoint", "Folder", "load", "save"]
