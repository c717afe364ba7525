"""What checkpoints are called. Imports no torch."""

from __future__ import annotations

import re

_NAME = re.compile(r"step-(\d{9,})")
_OLD = re.compile(r"(step-\d+|best)\.pt")


def name_of(step: int) -> str:
    """The name of the folder that holds the checkpoint of ``step``."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint a folder of this name holds; ``None`` if it is not one."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def is_old(name: str) -> bool:
    """Whether it is a file of Paceline 0.1, which kept a checkpoint in one."""
    return _OLD.fullmatch(name) is not None
