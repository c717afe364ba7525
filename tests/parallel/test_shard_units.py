"""What is sharded together, and what a user may ask for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from paceline.errors import LayoutError, TrainingError
from paceline.models import GPT
from paceline.parallel.shard import Sharding
from paceline.parallel.shard.units import find_units
from paceline.testing import make_mlp, make_resnet
from parallel import shard_cases


def test_blocks_are_units_and_tied_weights_stay_with_the_root() -> None:
    tied = GPT(vocab_size=5000, layers=2, width=16)
    assert find_units(tied) == ["blocks.0", "blocks.1"]


def test_what_is_as_large_as_a_block_is_a_unit_too() -> None:
    free = GPT(vocab_size=5000, layers=2, width=16, tied=False)
    assert find_units(free) == ["blocks.0", "blocks.1", "tokens", "head"]


def test_without_blocks_large_modules_are_units() -> None:
    assert find_units(make_mlp()) == ["0", "2"]
    assert find_units(make_resnet()) == ["3", "4"]
    # Attention reads the weight of its projection without calling it.
    assert "attention" in find_units(shard_cases.lstm())
    assert "attention.out_proj" not in find_units(shard_cases.lstm())


def test_a_block_with_an_outside_tie_gives_way_to_its_parts() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)))
    model[2][1].weight = model[0][0].weight
    assert find_units(model) == ["1", "0.1", "2.0"] or find_units(model) == ["0.1", "2.0", "1"]


def test_a_block_that_runs_several_times_is_one_unit() -> None:
    assert find_units(shard_cases.shared_block()) == ["layers.0", "layers.1"]


def test_patterns_and_functions() -> None:
    model = GPT(layers=2, width=16)
    assert find_units(model, "blocks.*") == ["blocks.0", "blocks.1"]
    assert find_units(model, ["blocks.*", "**.mlp"]) == [
        "blocks.0.mlp", "blocks.1.mlp", "blocks.0", "blocks.1",
    ]  # fmt: skip
    assert find_units(model, "blocks.[1-9].m?p") == ["blocks.1.mlp"]
    assert find_units(model, lambda name, module: name.endswith("attention")) == [
        "blocks.0.attention", "blocks.1.attention",
    ]  # fmt: skip
    assert find_units(model, []) == []


def test_by_number_of_parameters() -> None:
    model = GPT(layers=2, width=16, vocab_size=50)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert find_units(model, block) == ["blocks.0", "blocks.1"]
    # The larger parts of a block first; the block around them has too few left.
    assert find_units(model, block // 2) == ["blocks.0.mlp", "blocks.1.mlp", "positions"]
    assert find_units(model, 10**9) == []
    inside = find_units(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), 64)
    assert inside == ["0", "1"]
    with pytest.raises(TrainingError, match=r"units=0 must be a pattern .* a number of parameters"):
        Sharding(units=0)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("block.*", r"'block\.\*' matches no module with parameters\. Near names: blocks"),
        ("blocks", r"'blocks' is a ModuleList, which has no forward.*'blocks\.\*'"),
        ("head", r"'head' shares the parameter 'tokens\.weight'"),
        (lambda name, _: name == "tokens", r"'tokens' shares the parameter"),
    ],
)
def test_units_that_cannot_be_are_refused(units: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        find_units(GPT(layers=2, width=16), units)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshard": 1}, "reshard=1 must be True, False, or a number"),
        ({"reshard": "yes"}, "reshard='yes'"),
        ({"dtype": "float16"}, "dtype='float16' must be one of bf16, fp16"),
        ({"offload": "gradients"}, "offload='gradients' must be one of parameters, optimizer"),
        ({"units": 0}, "units=0 must be a pattern"),
        ({"units": True}, "units=True must be a pattern"),
        ({"units": ["a", ""]}, "units="),
        ({"units": ""}, "units=''"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Sharding(**options)


def test_options_are_checked_against_the_stage() -> None:
    Sharding(reshard=2).check(3, 4)
    with pytest.raises(TrainingError, match="reshard=True needs zero=3"):
        Sharding(reshard=True).check(2, 4)
    with pytest.raises(TrainingError, match="must divide the 4 ranks"):
        Sharding(reshard=3).check(3, 4)
    with pytest.raises(TrainingError, match="zero-bubble"):
        Sharding(reshard=True).check(3, 4, zero_bubble=True)
    with pytest.raises(LayoutError, match="zero=0"):
        Sharding().check(0, 4)


def test_a_sharding_can_be_compared_and_used_as_a_key() -> None:
    assert Sharding(units="a.*") == Sharding(units="a.*")
    assert len({Sharding(), Sharding(), Sharding(dtype="bf16")}) == 2
