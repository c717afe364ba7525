"""`paceline.schedules`: the schedules of configs, in Python."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline import schedules
from paceline.config import Schedule, lr_factor, scaled_lr
from paceline.errors import ConfigError, WorldError


def test_they_are_those_of_configs() -> None:
    for name in ("linear", "cosine"):
        config = Schedule(name=name, warmup_steps=10, min_ratio=0.1)
        by_steps = getattr(schedules, name)(100, warmup_steps=10, min_ratio=0.1)
        by_epochs = getattr(schedules, name)(
            epochs=5, warmup_epochs=0.5, steps_per_epoch=20, min_ratio=0.1
        )
        wanted = [lr_factor(config, step, 100) for step in range(120)]
        assert [by_steps(step) for step in range(120)] == wanted
        assert [by_epochs(step) for step in range(120)] == wanted
    assert schedules.constant(warmup_epochs=2, steps_per_epoch=3)(2) == 0.5
    for rule in ("none", "linear", "sqrt"):
        found = schedules.scaled_lr(0.1, global_batch=1024, reference_batch=256, rule=rule)
        assert found == scaled_lr(0.1, rule, 1024, 256)


def test_wrong_lengths_are_answered() -> None:
    with pytest.raises(ConfigError, match="must know its length: give steps, or epochs and"):
        schedules.cosine()
    with pytest.raises(ConfigError, match="warmup_epochs=5 needs steps_per_epoch"):
        schedules.cosine(100, warmup_epochs=5)
    with pytest.raises(ConfigError, match="epochs=5 and 100 steps both say how long"):
        schedules.linear(100, epochs=5, steps_per_epoch=20)
    with pytest.raises(ConfigError, match="reference_batch=0 must be a whole number"):
        schedules.scaled_lr(0.1, global_batch=8, reference_batch=0)


def numbers() -> list[float]:
    world = paceline.World.joined()
    assert world is paceline.World.current()
    rank = world.rank
    plain = paceline.collectives.mean(rank)
    weighed = paceline.collectives.mean(float("nan") if rank == 0 else rank, weight=rank)
    return [plain, weighed]


def test_a_number_is_averaged_over_ranks(ranks: Any) -> None:
    assert ranks(numbers, world_size=4) == [[1.5, 14 / 6]] * 4
    assert paceline.collectives.mean(3) == 3
    with pytest.raises(WorldError, match="mean: weight=-1 must be a number, 0 or more"):
        paceline.collectives.mean(3, weight=-1)
