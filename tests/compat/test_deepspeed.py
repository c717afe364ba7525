"""DeepSpeed's configs: every key answered, and the rates of its schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline.compat.deepspeed.schedules as schedules
from paceline.config import became, load
from paceline.config.deepspeed.settings import DeepSpeedBatch, read_settings
from paceline.config.deepspeed.table import KEYS, markdown
from paceline.errors import ConfigError

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


def test_the_docs_have_the_table_of_every_key() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "deepspeed.md"
    assert markdown() in page.read_text(encoding="utf-8")
    assert len(KEYS) > 150


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"stage": 3}, "did you mean 'zero_optimization.stage'?"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam' is not supported"),
        ({"amp": {"enabled": True}}, "amp is not supported"),
        ({"sparse_gradients": True}, "sparse_gradients=true is not supported"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3}, "not a multiple"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "nothing is kept on disks",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(config)
    assert said in str(caught.value)


def test_batch_algebra() -> None:
    assert DeepSpeedBatch(16).on(2) == DeepSpeedBatch(16, 8, 1)
    assert DeepSpeedBatch(None, 2, 3).on(4) == DeepSpeedBatch(24, 2, 3)
    assert DeepSpeedBatch(24, 2).on(4) == DeepSpeedBatch(24, 2, 3)
    with pytest.raises(ConfigError, match=r"train_batch_size=10 .* 2 × 2 × 2 = 8"):
        DeepSpeedBatch(10, 2, 2).on(2)


def test_a_config_of_ours_takes_it_over() -> None:
    ds = {"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": {"stage": 2}}
    config = load({"deepspeed": ds, "train": {"steps": 3}})
    assert (config.batch.global_batch, config.optimizer.lr, config.layout) == (8, 0.01, "zero=2")
    assert "train_batch_size is batch.global_batch: 8" in became(config)
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.5 and deepspeed's"):
        load({"deepspeed": ds, "optimizer": {"lr": 0.5}})


def test_schedules_have_deepspeeds_rates() -> None:
    found = json.loads((Path(__file__).parent / "deepspeed_schedules.json").read_text())
    for case in found["cases"]:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter], lr=0.02)
        schedule = getattr(schedules, case["name"])(optimizer, **case["args"])
        rates = []
        for _ in range(40):
            group = optimizer.param_groups[0]
            rates.append([float(group["lr"]), float(group["betas"][0])])
            optimizer.step()
            schedule.step()
        for step, expected in zip(found["steps"], case["rates"], strict=True):
            assert rates[step] == pytest.approx(expected, abs=1e-12), (case, step)
