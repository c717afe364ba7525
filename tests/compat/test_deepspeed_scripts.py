"""Scripts in the way of DeepSpeed's own: the same losses on two ranks as on one."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from paceline.testing import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples" / "deepspeed"
# Ranks add gradients in another order than one process does: in float32 that is a difference in
# the seventh digit, which the steps of these scripts carry into the fifth.
CLOSE = 1e-4


def script(name: str, arguments: list[str]) -> str:
    """What a rank prints that runs the script."""
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def losses(pool: RankPool, name: str, ranks: int, *arguments: str) -> list[float]:
    printed = pool.run(script, name, list(arguments), world_size=ranks)[0]
    return [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]


def test_pictures(rank_pool: RankPool) -> None:
    alone = losses(rank_pool, "pictures.py", 1, "--stage", "0")
    assert len(alone) == 2
    assert alone[1] < alone[0]
    for stage in ("1", "3"):
        found = losses(rank_pool, "pictures.py", 2, "--deepspeed", "--stage", stage)
        assert found == pytest.approx(alone, rel=CLOSE)


def test_pipeline(rank_pool: RankPool) -> None:
    alone = losses(rank_pool, "pipeline.py", 1)
    assert len(alone) == 6
    assert losses(rank_pool, "pipeline.py", 2, "--stages", "2") == pytest.approx(alone, rel=CLOSE)


def test_language_model_goes_on_where_it_was(rank_pool: RankPool, tmp_path: Path) -> None:
    name, whole, parts = "language_model.py", str(tmp_path / "whole"), str(tmp_path / "parts")
    rank_pool.run(script, name, ["--output_dir", whole], world_size=2)
    rank_pool.run(script, name, ["--output_dir", parts, "--max_steps", "3"], world_size=2)
    printed = rank_pool.run(script, name, ["--output_dir", parts, "--resume"], world_size=2)[0]
    assert "resumed at step 3, epoch 1" in printed
    saved = [
        torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
        for folder in (whole, parts)
    ]
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=0)
