"""The recipes load, pass every check on the machine they are for, and say what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import Config, check, learning_rate, load, resolve

RECIPES = Path(__file__).parents[2] / "recipes"
GPUS = {"gpt-base.yaml": 2}


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.name)
def test_recipe_passes_every_check(file: Path) -> None:
    config = load(file)
    gpus = GPUS.get(file.name, 0)
    assert check(config, devices=gpus) == []
    assert resolve(config, devices=gpus).layout == "dp=2"


def test_the_demo_written_out_is_the_demo() -> None:
    assert load(RECIPES / "demo.yaml") == Config()


def test_the_gpu_recipe_scales_its_rate_and_wants_gpus() -> None:
    config = load(RECIPES / "gpt-base.yaml")
    assert learning_rate(config) == pytest.approx(6e-4 * 2**0.5)
    (problem,) = check(config, devices=0)
    assert "launch.device=cuda, but torch can use no GPU on this machine" in problem
