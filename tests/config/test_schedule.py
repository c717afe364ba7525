"""The learning rate over the steps and over the batch size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Config, Schedule, learning_rate, load, lr_factor, scaled_lr
from paceline.errors import ConfigError


def factors(schedule: Schedule, total: int) -> list[float]:
    return [lr_factor(schedule, step, total) for step in range(total)]


def test_warmup_rises_in_equal_parts_and_never_stands_at_zero() -> None:
    schedule = Schedule(name="constant", warmup_steps=4)
    assert factors(schedule, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_goes_straight_down() -> None:
    schedule = Schedule(name="linear", warmup_steps=0, min_ratio=0.0)
    assert factors(schedule, 4) == [1.0, 0.75, 0.5, 0.25]


def test_cosine_is_half_way_down_at_half_time() -> None:
    schedule = Schedule(name="cosine", warmup_steps=10, min_ratio=0.2)
    assert lr_factor(schedule, 10, 110) == 1.0
    assert lr_factor(schedule, 60, 110) == pytest.approx(0.6)
    assert lr_factor(schedule, 110, 110) == pytest.approx(0.2)


@settings(deadline=None)
@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(1, 200),
)
def test_up_then_never_up_again_and_within_bounds(
    name: str, warmup: int, ratio: float, total: int
) -> None:
    schedule = Schedule(name=name, warmup_steps=warmup, min_ratio=ratio)  # type: ignore[arg-type]
    values = [lr_factor(schedule, step, total) for step in range(total + 10)]
    assert all(0 < value <= 1 or value == ratio == 0 for value in values)
    up, down = values[:warmup], values[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    if name != "constant" and total + 10 > warmup:
        assert values[-1] == pytest.approx(ratio) or len(values) <= warmup


def test_unknown_length_goes_with_constant_only() -> None:
    assert lr_factor(Schedule(name="constant"), 10**9, None) == 1.0
    with pytest.raises(ConfigError, match=r"schedule\.name='cosine' must know how many steps"):
        lr_factor(Schedule(name="cosine", warmup_steps=0), 0, None)
    with pytest.raises(ConfigError, match=r"step=-1 must be 0 or more"):
        lr_factor(Schedule(), -1, 10)


def test_scaling_rules() -> None:
    assert scaled_lr(0.1, "none", 1024, 256) == 0.1
    assert scaled_lr(0.1, "none", 1024, None) == 0.1
    assert scaled_lr(0.1, "linear", 1024, 256) == pytest.approx(0.4)
    assert scaled_lr(0.1, "sqrt", 1024, 256) == pytest.approx(0.2)
    assert scaled_lr(0.1, "sqrt", 128, 256) == pytest.approx(0.1 / math.sqrt(2))
    with pytest.raises(ConfigError, match=r"needs schedule\.reference_batch"):
        scaled_lr(0.1, "linear", 1024, None)
    with pytest.raises(ConfigError, match="must be one of none, linear, sqrt; got 'cubic'"):
        scaled_lr(0.1, "cubic", 1024, 256)


def test_the_rate_of_a_whole_config() -> None:
    assert learning_rate(Config()) == Config().optimizer.lr
    scaled = load(
        None,
        [
            "optimizer.lr=0.1",
            "batch.global_batch=64",
            "schedule.lr_scaling=linear",
            "schedule.reference_batch=16",
        ],
    )
    assert learning_rate(scaled) == pytest.approx(0.4)
