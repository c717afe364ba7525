"""Checkpoints that DeepSpeed 0.19.8 wrote with ZeRO on two ranks, loaded as weights.

``expected.pt`` is what DeepSpeed's own zero_to_fp32 makes of each. Stage 2 was trained in bf16.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import paceline.compat.deepspeed as deepspeed
from paceline.checkpoint.weights.deepspeed_zero import read_zero_checkpoint
from paceline.checkpoint.weights.weight_files import read_source
from paceline.errors import CheckpointError
from paceline.testing import RankPool

FILES = Path(__file__).parent / "deepspeed_zero_files"
STAGES = (1, 2, 3)


class Net(nn.Module):
    """The model that was saved: a buffer, a frozen parameter, and two that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.register_buffer("scale", torch.ones(7))
        self.b = nn.Linear(7, 3, bias=False)
        self.c = nn.Linear(3, 3)
        self.c.bias.requires_grad_(False)
        self.d = nn.Linear(7, 3, bias=False)
        self.d.weight = self.b.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.scale * self.a(x))
        out: torch.Tensor = self.c(self.b(h) + self.d(h))
        return out


def expected(stage: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(
        FILES / f"stage{stage}" / "expected.pt", weights_only=True
    )
    return found


def agrees(weights: dict[str, Any], stage: int) -> None:
    """With what DeepSpeed's tool says; it leaves the frozen parameter out."""
    wanted = expected(stage)
    assert set(Net().state_dict()) - set(wanted) <= {"c.bias"}
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value.float(), rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_its_weights_are_those_of_deepspeeds_own_tool(stage: int) -> None:
    folder = FILES / f"stage{stage}"
    weights = deepspeed.utils.get_fp32_state_dict_from_zero_checkpoint(folder)
    agrees(weights, stage)
    agrees(read_zero_checkpoint(folder, "global_step2"), stage)
    agrees(read_source(folder / "global_step2").tensors, stage)
    assert set(weights) == set(Net().state_dict())
    model = Net()
    paceline.load_weights(model, folder)
    agrees(model.state_dict(), stage)
    model = Net()
    deepspeed.utils.load_state_dict_from_zero_checkpoint(model, str(folder))
    agrees(model.state_dict(), stage)


def an_engine_takes_them() -> None:
    for stage in STAGES:
        model = Net()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        }
        trained = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            path, client = engine.load_checkpoint(FILES / f"stage{stage}")
        assert str(path).endswith("global_step2")
        assert client == {}
        assert any("begin anew" in str(one.message) for one in told) == (engine.global_rank == 0)
        named = engine.module.named_parameters(remove_duplicate=False)
        whole = {name: deepspeed.utils.whole_parameter(p) for name, p in named}
        agrees(whole | dict(engine.module.named_buffers()), stage)


def test_an_engine_takes_them(rank_pool: RankPool) -> None:
    rank_pool.run(an_engine_takes_them, world_size=2)


class Hostile:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.target),)


def copied(tmp_path: Path, stage: int = 1) -> Path:
    target = tmp_path / "saved"
    shutil.copytree(FILES / f"stage{stage}", target)
    return target


def test_code_in_it_is_not_executed(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    touched = tmp_path / "touched"
    file = folder / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"zero_stage": Hostile(str(touched))}}, file)
    for read in (read_zero_checkpoint, lambda path: paceline.load_weights(Net(), path)):
        with pytest.raises(CheckpointError, match="execute code"):
            read(folder)
    file.write_bytes(pickle.dumps(Hostile(str(touched))))
    with pytest.raises(CheckpointError, match="code"):
        read_zero_checkpoint(folder)
    assert not touched.exists()


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    rank = folder / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    saved = rank.read_bytes()
    rank.unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it"):
        read_zero_checkpoint(folder)
    rank.write_bytes(saved[: len(saved) // 2])
    with pytest.raises(CheckpointError, match="cut off"):
        read_zero_checkpoint(folder)
    torch.save({"optimizer_state_dict": {"zero_stage": 1}}, rank)
    with pytest.raises(CheckpointError, match="not as DeepSpeed writes it"):
        read_zero_checkpoint(folder)
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="no name of a folder"):
        read_zero_checkpoint(folder)
    with pytest.raises(CheckpointError, match="holds no checkpoint of DeepSpeed's ZeRO"):
        read_zero_checkpoint(tmp_path)
