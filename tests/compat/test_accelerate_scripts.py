"""Scripts in the way of Accelerate's own: the same losses on several ranks as on one.

``benchmarks/compat_scripts.py`` runs them through the launcher, beside Accelerate itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "accelerate"
# In float32 the order of sums is in the seventh digit, which the steps carry into the fifth.
CLOSE = 1e-4


def printed(name: str, *arguments: str) -> list[float]:
    """The numbers that a script prints on this rank."""
    sys.argv = [name, *arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [float(value) for value in re.findall(r"(?:loss|accuracy) (\d+\.\d+)", out.getvalue())]


def every_script(folder: str) -> dict[str, list[float]]:
    os.chdir(folder)
    found = {
        "nlp": printed("nlp.py", "--epochs", "2"),
        "cv": printed("cv.py", "--epochs", "3"),
        "gan": printed("gan.py", "--epochs", "2"),
        "gan, zero=2": printed("gan.py", "--epochs", "2", "--zero", "2"),
    }
    before = printed("cv.py", "--epochs", "3", "--stop-after", "2", "--output-dir", "stopped")
    last = os.path.join("stopped", "epoch_1")
    after = printed("cv.py", "--epochs", "3", "--resume-from-checkpoint", last)
    found["cv, resumed"] = before + after
    return found


def test_the_same_losses_on_any_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    found = {}
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        found[size], *others = ranks(every_script, str(folder), world_size=size)
        assert all(not any(other.values()) for other in others)  # rank 0 alone prints
        # To the bit: the same numbers on the same ranks.
        assert found[size]["cv, resumed"] == found[size]["cv"]
        assert found[size]["gan, zero=2"] == pytest.approx(found[size]["gan"], rel=CLOSE)
    assert [len(values) for values in found[1].values()] == [4, 6, 4, 4, 6]
    for size in (2, 4):
        for name, values in found[size].items():
            assert values == pytest.approx(found[1][name], rel=CLOSE), (size, name)
