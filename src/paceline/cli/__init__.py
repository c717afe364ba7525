"""The command line."""

from paceline.cli.app import main

__all__ = ["main"]
