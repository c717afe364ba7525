"""The table of DeepSpeed's keys, and what is read by it: sizes, optimizers, schedules, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from docs_blocks import ROOT
from paceline.compat.deepspeed import optimizers, schedules
from paceline.config.deepspeed.optimizers import choose_optimizer
from paceline.config.deepspeed.read import read_keys
from paceline.config.deepspeed.schedules import SCHEDULES, choose_schedule
from paceline.config.deepspeed.settings import DeepSpeedBatch, read_settings
from paceline.config.deepspeed.table import KEYS, SECTIONS, markdown
from paceline.errors import ConfigError

REFERENCE = yaml.safe_load((Path(__file__).parent / "deepspeed_reference.yaml").read_text("utf-8"))
NOT_A_VALUE = object()


def problems(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read_settings(config, name="ds")
    return list(refused.value.problems)


def test_every_documented_key_is_in_the_table() -> None:
    """A key with a value that it cannot have is found wrong, and never unknown."""
    assert len(REFERENCE["keys"]) > 250
    for key in REFERENCE["keys"]:
        config: Any = NOT_A_VALUE
        for name in reversed(key.split(".")):
            config = {name: config}
        unknown = [text for text in read_keys(config).problems if text.startswith("unknown")]
        assert unknown == [], key


def test_the_page_has_the_table_of_the_code() -> None:
    page = (ROOT / "docs/guides/deepspeed.md").read_text("utf-8")
    assert page.partition("## Every key\n\n")[2] == markdown()


def test_every_key_says_what_becomes_of_it() -> None:
    for key in [*KEYS.values(), *(section.key for section in SECTIONS.values())]:
        assert key.becomes, key.name
        assert key.fate in ("used", "noted", "refused")


def test_a_refused_key_is_refused_and_one_that_asks_for_nothing_is_not() -> None:
    assert problems({"train_batch_size": 8, "sparse_gradients": True}) == [
        "ds: sparse_gradients=true is not supported. There is no sparse sum of embeddings' "
        "gradients. Leave it out, and make the embeddings with sparse=False."
    ]
    settings = read_settings({"train_batch_size": 8, "sparse_gradients": False})
    assert all("sparse" not in note for note in settings.notes)
    assert problems({"amp": {"enabled": True}})[0].startswith("ds: amp is not supported.")
    read_settings({"amp": {"enabled": False, "opt_level": "O2"}})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"train_batchsize": 8}, "unknown key 'train_batchsize'; did you mean 'train_batch_size'?"),
    (
        {"zero_optimization": {"stag": 2}},
        "unknown key 'zero_optimization.stag'; did you mean 'zero_optimization.stage'?",
    ),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 must be 0, 1, 2 or 3."),
    ({"zero_optimization": 2}, "zero_optimization must be a mapping; got 2."),
    ({"train_batch_size": "8"}, 'train_batch_size must be a whole number; got "8".'),
    ({"train_batch_size": 0}, "train_batch_size=0 must be 1 or more."),
    ({"train_batch_size": 1.5}, "train_batch_size must be a whole number; got 1.5."),
    ({"fp16": {"enabled": 1}}, "fp16.enabled must be true or false; got 1."),
    (
        {"fp16": {"hysteresis": "auto"}},
        'fp16.hysteresis: "auto" is not taken here. Write the value.',
    ),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16 and bf16 are both enabled: a run computes in one of them. Switch one off.",
    ),
    ({"gradient_clipping": -1}, "gradient_clipping=-1 must be 0 (none) or more."),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device='nvme' is not supported: nothing is kept on "
        "disks. Use 'cpu' or 'none'.",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer needs a stage: 1, 2 or 3. Set "
        "zero_optimization.stage, or leave it out.",
    ),
    (
        {"optimizer": {"params": {"lr": 1}}},
        "optimizer.type is missing: optimizer.params is of none.",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "scheduler.params.total_num_steps is missing: WarmupDecayLR needs it.",
    ),
    (
        {"scheduler": {"type": "WarmupLr"}},
        "scheduler.type='WarmupLr' is no scheduler of DeepSpeed's; did you mean 'WarmupLR'?",
    ),
]


@pytest.mark.parametrize(("config", "message"), WRONG)
def test_a_mistake_is_answered_with_exactly_its_message(
    config: dict[str, Any], message: str
) -> None:
    assert problems(config) == [f"ds: {message}"]


@pytest.mark.parametrize(
    ("given", "ranks", "whole"),
    [
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 2, (32, 4, 4)),
        ((32, None, 2), 4, (32, 4, 2)),
        ((None, 4, 2), 4, (32, 4, 2)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 4, None), 2, (8, 4, 1)),
    ],
)
def test_the_sizes_of_a_batch(
    given: tuple[int | None, ...], ranks: int, whole: tuple[int, ...]
) -> None:
    assert DeepSpeedBatch(*given).on(ranks) == DeepSpeedBatch(*whole)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [((32, 4, 2), 2), ((30, 4, None), 2), ((2, None, None), 4), ((None, None, 2), 2)],
)
def test_sizes_that_contradict_each_other(given: tuple[int | None, ...], ranks: int) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        DeepSpeedBatch(*given).on(ranks)


@pytest.mark.parametrize("case", REFERENCE["schedules"], ids=lambda case: case["type"])
def test_a_schedule_has_the_rates_of_deepspeed(case: dict[str, Any]) -> None:
    choice = choose_schedule(case["type"], case["params"])
    assert choice.problems == []
    assert choice.name == f"paceline.compat.deepspeed.schedules:{case['type']}"
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=0.03)
    schedule = getattr(schedules, case["type"])(optimizer, **choice.args)
    rates, betas = [], []
    for _ in case["rates"]:
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(case["rates"], rel=1e-12, abs=1e-15)
    assert betas == pytest.approx(case.get("betas", [0.9] * len(betas)), rel=1e-12)


def test_every_schedule_is_compared() -> None:
    assert {case["type"] for case in REFERENCE["schedules"]} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("kind", "params", "name", "args"),
    [
        ("Adam", {"lr": 1.0}, "torch.optim:AdamW", {"lr": 1.0, "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False}, "torch.optim:Adam", {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, "torch.optim:AdamW", {}),
        ("adamw", {"eps": "auto"}, "torch.optim:AdamW", {"weight_decay": 0.0, "eps": 1e-8}),
        ("Lion", {}, "paceline.compat.deepspeed.optimizers:Lion", {"weight_decay": 0.0}),
        ("SGD", {"momentum": 0.9}, "torch.optim:SGD", {"momentum": 0.9}),
        ("Adagrad", {"lr": 0.1}, "torch.optim:Adagrad", {"lr": 0.1}),
    ],
)
def test_an_optimizer_by_its_name(
    kind: str, params: dict[str, Any], name: str, args: dict[str, Any]
) -> None:
    choice = choose_optimizer(kind, params)
    assert (choice.problems, choice.name, choice.args) == ([], name, args)


@pytest.mark.parametrize(
    ("kind", "params", "part"),
    [
        ("OneBitAdam", {}, "one bit"),
        ("Lamb", {}, "torch has no LAMB"),
        ("AdmaW", {}, "did you mean 'AdamW'?"),
        ("Adam", {"learning_rate": 1}, "unknown key 'optimizer.params.learning_rate'"),
        ("Adam", {"max_grad_norm": 1}, "gradient_clipping"),
        ("Adam", {"bias_correction": False}, "bias_correction=false is not supported"),
    ],
)
def test_an_optimizer_that_is_refused(kind: str, params: dict[str, Any], part: str) -> None:
    (problem,) = choose_optimizer(kind, params).problems
    assert part in problem


def test_lion_updates_by_signs() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    lion = optimizers.Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient, expected in (([1.0, -3.0], [0.85, -1.8]), ([-0.01, 3.0], [0.7075, -1.81])):
        weight.grad = torch.tensor(gradient)
        lion.step()
        assert weight.tolist() == pytest.approx(expected)
