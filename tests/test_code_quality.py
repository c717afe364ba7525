"""The house rules that a machine can check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

COMMANDS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "layers": ["lint-imports"],
}


@pytest.mark.timeout(900)  # the type checker starts without a cache on a new machine
@pytest.mark.parametrize("name", COMMANDS)
def test_clean(name: str) -> None:
    program, *arguments = COMMANDS[name]
    done = subprocess.run([BIN / program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
