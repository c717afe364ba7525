"""The example of these rooms runs, and prints what it says (the guides: tests/test_docs_code.py)."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.world(1, 2)
def test_the_collectives_example(ranks, world_size, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks may not share one GPU
    example = str(ROOT / "examples" / "world_collectives.py")
    ranks(lambda: runpy.run_path(example, run_name="__main__") and None, join=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"[rank 0] {world_size} rank(s) on ")
    assert len(lines) == world_size + 2  # only rank 0 speaks
