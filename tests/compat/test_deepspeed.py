"""DeepSpeed's configs and scripts: every key answered, and the same losses on any ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline.compat.deepspeed as deepspeed
import paceline.compat.deepspeed.schedules as schedules
from paceline.compat.deepspeed.loss_scale import DeepSpeedScaler
from paceline.config import became, load
from paceline.config.deepspeed.settings import DeepSpeedBatch, Fp16Scaling, read_settings
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


def test_scaler_has_hysteresis_and_a_window() -> None:
    scaler = DeepSpeedScaler(Fp16Scaling(initial=16.0, window=2, hysteresis=2))
    scales = []
    for overflowed in (True, True, False, False, False, True):
        scaler.update(overflowed)
        scales.append(scaler.scale)
    assert scales == [16.0, 8.0, 8.0, 8.0, 16.0, 16.0]


def losses(config: dict[str, Any], folder: str) -> list[float]:
    """On this rank: six micro-batches, a save, and a load that undoes two more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=model, config=config)
    size, rank = engine.world_size, engine.global_rank
    generator = torch.Generator().manual_seed(3)
    found = []

    def train(count: int) -> None:
        for _ in range(count):
            x, y = (torch.randn(8, n, generator=generator) for n in (4, 2))
            x, y = (t.chunk(size)[rank].to(engine.device) for t in (x, y))
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            if size > 1:
                torch.distributed.all_reduce(mean)
            found.append(float(mean) / size)

    train(6)
    assert engine.global_steps == 6 // config["gradient_accumulation_steps"]
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    state = generator.get_state()
    train(2)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client == {"epoch": 3}
    generator.set_state(state)
    train(2)
    assert found[-2:] == pytest.approx(found[-4:-2])
    return found


def test_stages_and_accumulation_train_as_one_process(ranks: Any, tmp_path: Path) -> None:
    for stage in (0, 3):
        config = {
            "train_batch_size": 16,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": ADAM,
            "zero_optimization": {"stage": stage},
        }
        alone = losses({**config, "zero_optimization": {"stage": 0}}, str(tmp_path / f"a{stage}"))
        for own in ranks(losses, config, str(tmp_path / f"b{stage}"), world_size=2):
            assert own == pytest.approx(alone, rel=1e-5)


def test_names_that_are_not_there_say_what_to_use() -> None:
    with pytest.raises(AttributeError, match="layout='pp=2'"):
        _ = deepspeed.PipelineModule  # type: ignore[attr-defined]
