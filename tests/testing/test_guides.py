"""The code in the guides and examples of these rooms runs, and prints what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from paceline.testing import hosts_available
from paceline.testing.plugin import Ranks

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / "guides" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run_block(code: str) -> dict:
    namespace = {"__name__": "guide"}
    exec(compile(code, "guide", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("number", range(len(blocks("world.md"))))
def test_the_world_guide(number):
    run_block(blocks("world.md")[number])


def test_the_testing_guide(ranks, capsys):
    with_pytest, without_pytest, helpers, _ = blocks("testing.md")
    for size in (2, 3):
        run_block(with_pytest)["test_ranks_add_up"](Ranks(ranks.pool, size), size)
    run_block(without_pytest)
    assert capsys.readouterr().out == "[8, 8]\n[3, 3, 3]\n[2, 2]\n"
    run_block(helpers)
    assert capsys.readouterr().out.startswith("0.weight: 1 of 128 elements differ, most at [3, 1]")


@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
def test_the_hosts_of_the_testing_guide(capsys):
    run_block(blocks("testing.md")[-1])
    assert capsys.readouterr().out.splitlines() == [
        *("host0 10.99.0.1 host0", "host1 10.99.0.2 host1", "-9"),
    ]


@pytest.mark.world(1, 2)
def test_the_collectives_example(ranks, world_size, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks may not share one GPU
    example = str(ROOT / "examples" / "world_collectives.py")
    ranks(lambda: runpy.run_path(example, run_name="__main__") and None, join=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"[rank 0] {world_size} rank(s) on ")
    assert len(lines) == world_size + 2  # only rank 0 speaks
