"""One process, several devices: placement, what it refuses, and the same numbers."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from paceline.errors import TrainingError
from paceline.parallel.device_map import place
from paceline.parallel.device_map.moves import Align, device_of, moved
from paceline.parallel.device_map.plan import plan
from parallel.device_cases import Chain, Skips, Tied

CPU = torch.device("cpu")
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]
META = torch.device("meta")
TESTS = Path(__file__).parent.parent


def test_the_same_numbers_over_two_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "parallel.device_cases"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.stdout.endswith("all the same\n"), done.stdout + done.stderr


def test_longest_name_wins_and_one_device_needs_one_hook() -> None:
    model = Chain()
    placed = place(model, {"": "cpu", "blocks.0": "cpu:0"})
    assert placed.modules == {"": CPU}
    assert placed.devices == [CPU]
    assert "forward" not in vars(model)
    assert str(placed).splitlines()[0].split() == ["module", "device", "parameters", "needs", "ms"]
    placed.remove()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_parameters_stay_the_same_objects_and_a_deep_copy_works() -> None:
    model = Chain()
    before = dict(model.named_parameters())
    place(model, {"": "cpu"})
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    twin = copy.deepcopy(model)
    twin(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "device_map", "message"),
    [
        (Chain(), {"blocks": "cpu"}, "nothing says where 'shift' goes.*'' for all the rest"),
        (Chain(), {"": "cpu", "block.0": "cpu"}, "no module or parameter 'block.0'. Did you mean"),
        (Chain(), {"": "cpu", "head": "cuda:7"}, "'head': device 'cuda:7' is not there. .*cpu"),
        (Chain(), {"": "gpu"}, "device 'gpu' is not there"),
        (Chain(), {"": "meta"}, "device 'meta' is not there"),
        (Chain(), "balanced", "must be 'auto' or a mapping"),
        (nn.Linear(2, 2, device="meta"), {"": "cpu"}, "'weight' is on the meta device"),
    ],
)
def test_mistakes_are_named(model: nn.Module, device_map: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        place(model, device_map)


def test_tied_weights_must_be_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.parallel.device_map.placement._device",
        lambda device, name=None: torch.device(device),
    )
    with pytest.raises(TrainingError, match=r"'first.weight' and 'last.weight' are one tensor"):
        place(Tied(), {"": "cpu", "last": "cuda:0"})


def test_options_of_auto_are_refused_beside_a_mapping_and_checked() -> None:
    with pytest.raises(TrainingError, match="guide device_map='auto'"):
        place(Chain(), {"": "cpu"}, max_memory={"cpu": "1GiB"})
    with pytest.raises(TrainingError, match="devices is empty"):
        place(Chain(), "auto", devices=[])
    with pytest.raises(TrainingError, match="max_memory '10 gigs' must be"):
        place(Chain(), "auto", max_memory={"cpu": "10 gigs"})
    with pytest.raises(TrainingError, match="max_memory names cuda:0"):
        plan(Chain(), [CPU], {GPUS[0]: 10}, None)
    with pytest.raises(TrainingError, match="ran no part of the model"):
        place(Chain(), "auto", sample=lambda model: None)


# ------------------------------------------------------------------------------ auto


def devices_of(rows: Any) -> dict[str, str]:
    return {row.name: str(row.device) for row in rows}


def test_auto_stays_on_one_device_where_it_fits() -> None:
    rows = plan(Chain(), [*GPUS, CPU], dict.fromkeys([*GPUS, CPU], "1GiB"), None)
    assert set(devices_of(rows).values()) == {"cuda:0"}
    assert [row.name for row in rows] == ["shift", *(f"blocks.{i}" for i in range(4)), "head"]


def test_auto_fills_gpus_in_running_order_then_the_cpu() -> None:
    model = Chain()
    block = 4 * sum(p.nbytes for p in model.blocks[0].parameters())
    small = 4 * 8 * 4
    limits = {GPUS[0]: 2 * block + small, GPUS[1]: block, CPU: "1MiB"}
    rows = plan(model, [*GPUS, CPU], limits, None)
    assert devices_of(rows) == {
        "shift": "cuda:0",
        "blocks.0": "cuda:0",
        "blocks.1": "cuda:0",
        "blocks.2": "cuda:1",
        "blocks.3": "cpu",
        "head": "cpu",
    }
    with pytest.raises(TrainingError, match=r"needs .*largest part 'blocks.0'.*does not fit into"):
        plan(model, GPUS, dict.fromkeys(GPUS, block), None)


def test_auto_spreads_evenly_over_equal_devices() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))
    piece = 4 * sum(p.nbytes for p in model[0].parameters())
    rows = plan(model, GPUS, dict.fromkeys(GPUS, 3 * piece), None)
    assert list(devices_of(rows).values()) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_auto_keeps_tied_parts_together_and_frozen_ones_small() -> None:
    model = nn.Sequential()
    model.embed = nn.Linear(8, 8, bias=False)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(2))
    model.head = nn.Linear(8, 8, bias=False)
    model.head.weight = model.embed.weight
    piece = 4 * 64 * 4
    rows = plan(model, GPUS, {GPUS[0]: 2 * piece, GPUS[1]: piece}, None)
    assert devices_of(rows) == {
        "embed": "cuda:0",
        "blocks.0": "cuda:0",
        "blocks.1": "cuda:1",
        "head": "cuda:0",
    }
    model.requires_grad_(False)
    rows = plan(model, GPUS, dict.fromkeys(GPUS, piece), None)
    assert set(devices_of(rows).values()) == {"cuda:0"}


class Backwards(nn.Module):
    """Runs its blocks last to first; one of them takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def test_auto_measures_by_a_sample_and_leaves_the_model_as_it_was() -> None:
    model = Backwards()
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    batch = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    placed = place(model, "auto", devices=["cpu"], sample=lambda m: m(batch))
    assert [row.name for row in placed.rows] == ["blocks.2", "blocks.1", "blocks.0"]
    saved = batch.nbytes
    for row in placed.rows:
        assert row.seconds is not None
        assert row.seconds > 0
        assert row.needs >= 4 * row.parameters - 3 * 72 + saved  # buffers need no gradient
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_pre_hooks for m in model.blocks.modules())


# ------------------------------------------------------------------------------ moving


Pair = namedtuple("Pair", "a b")


@dataclass
class Record:
    x: Tensor
    label: str


def test_everything_nested_is_moved_and_the_rest_is_left_alone() -> None:
    x = torch.zeros(2)
    value = {
        "pair": Pair(x, 1),
        "list": [x, (x, "text")],
        "record": Record(x, "label"),
        "user": UserDict(x=x),
        "none": None,
    }
    assert moved(value, CPU) is value
    there = moved(value, META)
    assert value["list"][0].device == CPU  # type: ignore[index]
    assert there["pair"] == Pair(there["pair"].a, 1)
    assert isinstance(there["user"], UserDict)
    found = [
        there["pair"].a,
        there["list"][0],
        there["list"][1][0],
        there["record"].x,
        there["user"]["x"],
    ]
    assert {tensor.device for tensor in found} == {META}
    assert there["record"].label == "label"
    packed = pack_sequence([torch.zeros(2)])
    assert moved(packed, CPU) is packed
    assert device_of({"a": [1, Record(x, "")]}) == CPU
    assert device_of([1, "a"]) is None


def test_operands_meet_on_the_device_of_the_largest_or_of_what_is_changed() -> None:
    large, small = torch.zeros(4, 4, device="meta"), torch.zeros(4)
    with Align.once(), Align.once():
        assert (small + large).device == META
        assert torch.cat([large, torch.zeros(1, 4)]).device == META
        changed = torch.zeros(4, 4, device="meta")
        changed += torch.zeros(8, 4, 4)[0]
        changed[0] = small
        assert changed.device == META
        assert (torch.tensor(2.0) * large).device == META  # a scalar goes anywhere by itself
        assert small.to(large.device).device == META
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.cat([large, torch.zeros(1, 4)]).cpu()


def test_a_mixed_model_runs_its_own_code_aligned() -> None:
    model = Skips()
    place(model, {"": "cpu"})
    x = torch.randn(2, 8)
    assert torch.equal(model(x), Skips.forward(model, x))
