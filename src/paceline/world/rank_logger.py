"""Loggers whose lines say which rank they are from."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from paceline.launch.environment import read_environment
from paceline.world.world import World


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Puts ``[rank n]`` before every line; made by ``paceline.get_logger``."""

    def __init__(self, logger: logging.Logger, *, main_only: bool) -> None:
        super().__init__(logger, {})
        self._main_only = main_only

    def isEnabledFor(self, level: int) -> bool:
        """Whether a line of this level is written, by this rank."""
        return (not self._main_only or _rank() == 0) and super().isEnabledFor(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """The line as it is written."""
        return f"[rank {_rank()}] {msg}", kwargs


def get_logger(name: str = "paceline", *, main_only: bool = False) -> RankLogger:
    """The logger ``name`` of Python's ``logging``, with ``[rank n]`` before every line.

    With ``main_only``, rank 0 alone writes.
    """
    return RankLogger(logging.getLogger(name), main_only=main_only)


def _rank() -> int:
    """Asked for each line: a logger may be made before the world is joined."""
    world = World.joined()
    if world is not None:
        return world.rank
    environment = read_environment()
    return 0 if environment is None else environment.rank
