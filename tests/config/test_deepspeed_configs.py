"""DeepSpeed configs of public projects, and what ``deepspeed:`` in a config makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import Config, became, config_notes, dump, load, resolve
from paceline.config.deepspeed.sections import expand
from paceline.errors import ConfigError

CASES = yaml.safe_load((Path(__file__).parent / "deepspeed_configs.yaml").read_text("utf-8"))
SMALL: dict[str, Any] = {"train_batch_size": 8, "gradient_clipping": 0.5}


def problems(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(config)
    return list(refused.value.problems)


def test_there_are_forty_of_them_and_most_are_taken() -> None:
    assert len(CASES) >= 40
    assert len({case["source"] for case in CASES}) == len(CASES)
    assert sum("becomes" in case for case in CASES) >= 30


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["source"])
def test_a_config_of_a_public_project(case: dict[str, Any]) -> None:
    given = {**case["beside"], "deepspeed": case["config"]}
    if "refused" in case:
        with pytest.raises(ConfigError) as refused:
            expand(given, ".")
        assert list(refused.value.problems) == case["refused"]
        return
    expansion = expand(given, ".")
    assert expansion.data == case["becomes"]
    assert [note.split(":")[0].split(" ")[0] for note in expansion.notes] == case["notes"]
    assert isinstance(load(given), Config)


def test_a_file_is_looked_for_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ds.json").write_text(json.dumps(SMALL))
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 99}))
    (tmp_path / "here" / "c.yaml").write_text("deepspeed: ds.json\n")
    monkeypatch.chdir(tmp_path)
    config = load("here/c.yaml")
    assert (config.batch.global_batch, config.train.clip_norm) == (8, 0.5)
    assert "train_batch_size is batch.global_batch: 8" in became(config)


def test_what_is_written_out_needs_the_file_no_more(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**SMALL, "bf16": {"enabled": True}}))
    (tmp_path / "c.yaml").write_text("deepspeed: ds.json\n")
    resolved = resolve(load(tmp_path / "c.yaml"))
    (tmp_path / "ds.json").unlink()
    (tmp_path / "written.yaml").write_text(dump(resolved))
    again = load(tmp_path / "written.yaml")
    assert again == resolved
    assert (again.deepspeed, again.precision, again.batch.global_batch) == (None, "bf16", 8)


def test_overrides_reach_into_it() -> None:
    config = load({"deepspeed": SMALL}, ["deepspeed.train_batch_size=32", "train.steps=3"])
    assert (config.batch.global_batch, config.train.steps) == (32, 3)


def test_the_loss_scale_of_fp16() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1}
    config = load({"deepspeed": {**SMALL, "fp16": fp16}})
    assert config.precision == "fp16"
    assert (config.loss_scaling.init_scale, config.loss_scaling.growth_interval) == (256, 50)
    assert config_notes(config) == []
    fixed = load({"deepspeed": {**SMALL, "fp16": {"enabled": True, "loss_scale": 128}}})
    assert (fixed.loss_scaling.init_scale, fixed.loss_scaling.growth_interval) == (128, 2**31 - 1)
    assert config_notes(fixed) == [
        "deepspeed: fp16.loss_scale: the scale never grows, but each overflow halves it here"
    ]


def test_auto_is_taken_from_the_config() -> None:
    params = {"warmup_max_lr": "auto", "warmup_num_steps": 5, "total_num_steps": "auto"}
    config = load(
        {
            "deepspeed": {
                "train_batch_size": "auto",
                "gradient_clipping": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
                "scheduler": {"type": "WarmupDecayLR", "params": params},
                "bf16": {"enabled": "auto"},
            },
            "batch": {"global_batch": 12},
            "optimizer": {"lr": 0.02},
            "train": {"steps": 40, "clip_norm": 0.3},
            "precision": "bf16",
        }
    )
    assert (config.batch.global_batch, config.train.clip_norm) == (12, 0.3)
    assert config.precision == "bf16"
    assert config.optimizer.args == {"betas": [0.9, 0.999]}
    assert config.schedule.args == {
        "warmup_max_lr": 0.02,
        "warmup_num_steps": 5,
        "total_num_steps": 40,
    }
    assert 'gradient_clipping is "auto": train.clip_norm says it' in became(config)


def test_auto_that_nothing_answers() -> None:
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    assert problems(
        {
            "deepspeed": {
                "train_batch_size": "auto",
                "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
                "scheduler": {"type": "WarmupCosineLR", "params": params},
            }
        }
    ) == [
        'deepspeed: optimizer.params.lr is "auto": say optimizer.lr in this config.',
        'deepspeed: scheduler.params.warmup_num_steps is "auto": say '
        "schedule.args.warmup_num_steps in this config.",
        'deepspeed: scheduler.params.total_num_steps is "auto": say '
        "schedule.args.total_num_steps in this config.",
        "deepspeed: no size of a batch is given: say batch.global_batch, or "
        "batch.per_device_batch, in this config.",
    ]


CLASHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        SMALL,
        {"batch": {"global_batch": 16}},
        "batch.global_batch=16 and deepspeed's train_batch_size (batch.global_batch=8) differ. "
        "Leave one of them out.",
    ),
    (
        SMALL,
        {"train": {"clip_norm": 2.0}},
        "train.clip_norm=2.0 and deepspeed's gradient_clipping (train.clip_norm=0.5) differ. "
        "Leave one of them out.",
    ),
    (
        {**SMALL, "bf16": {"enabled": False}},
        {"precision": "bf16"},
        'precision="bf16" and deepspeed\'s bf16.enabled (precision="fp32") differ. Leave one of '
        "them out.",
    ),
    (
        {**SMALL, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
        {"optimizer": {"args": {"betas": [0.9, 0.99]}}},
        "optimizer.args.betas=[0.9, 0.99] and deepspeed's optimizer.params "
        "(optimizer.args.betas=[0.9, 0.95]) differ. Leave one of them out.",
    ),
    (
        {**SMALL, "zero_optimization": {"stage": 2}},
        {"layout": "dp=2,zero=3"},
        "layout 'dp=2,zero=3' has zero=3, and deepspeed asks for zero=2 "
        "(zero_optimization.stage). Leave zero out of the layout, or make them agree.",
    ),
]


@pytest.mark.parametrize(("config", "beside", "message"), CLASHES)
def test_what_both_configs_give_must_agree(
    config: dict[str, Any], beside: dict[str, Any], message: str
) -> None:
    assert problems({"deepspeed": config, **beside}) == [message]


def test_what_both_configs_give_alike_is_fine_and_layouts_are_joined() -> None:
    config = load(
        {
            "deepspeed": {**SMALL, "zero_optimization": {"stage": 2}},
            "batch": {"global_batch": 8},
            "layout": "dp=2",
        }
    )
    assert config.layout == "dp=2,zero=2"
    left_out = load({"deepspeed": {"train_batch_size": 8}, "train": {"clip_norm": 2.0}})
    assert left_out.train.clip_norm == 2.0


def test_a_stage_alone_is_spread_over_all_devices() -> None:
    wanted = {"deepspeed": {**SMALL, "zero_optimization": {"stage": 2}}}
    assert resolve(load(wanted), devices=4).layout == "dp=4,zero=2"
    assert resolve(load(load(wanted)), devices=4).layout == "dp=4,zero=2"
    assert resolve(load(wanted), devices=0).layout == "dp=2,zero=2"
    assert resolve(load(wanted, ["layout=zero=3"]), devices=4).layout == "dp=1,zero=3"
    assert resolve(load({**wanted, "launch": {"nproc": 3}}), devices=4).layout == "dp=3,zero=2"
    parallel = {**wanted["deepspeed"], "tensor_parallel": {"autotp_size": 2}}
    assert resolve(load({"deepspeed": parallel}), devices=4).layout == "dp=2,zero=2,tp=2"
    assert resolve(load({"deepspeed": parallel}), devices=1).launch.nproc == 2


@pytest.mark.parametrize("value", [[], 3, True, 0.5])
def test_a_value_of_the_wrong_kind(value: object) -> None:
    assert problems({"deepspeed": value}) == [
        "deepspeed must be the path of a DeepSpeed config, or the mapping in it; got "
        + json.dumps(value)
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert problems({"deepspeed": str(missing)}) == [
        f"{missing}: no such file; name a DeepSpeed config (JSON)."
    ]
    lists = tmp_path / "list.json"
    lists.write_text("[1]")
    assert problems({"deepspeed": str(lists)}) == [
        f"{lists}: a DeepSpeed config is a JSON object, not a list."
    ]
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    (message,) = problems({"deepspeed": str(broken)})
    assert message.startswith(f"{broken}: cannot be read as a DeepSpeed config: ")
