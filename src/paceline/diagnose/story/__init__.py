"""The story of a run: what happened, in order, in words, and its root cause first."""

from paceline.diagnose.story.story import Story, of_run, tell

__all__ = ["Story", "of_run", "tell"]
