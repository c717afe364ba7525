"""Replicas that train alone, saved and restored: to the bit, and at another number of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.engine.internals import internals_of
from paceline.sync.local_sgd import LocalSGD
from sync.local_cases import (
    EXACT,
    RESUMED,
    everything,
    make_engine,
    my_share,
    sgd,
    wide_engine,
)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.world(3)
def test_resumed_at_any_step_is_equal_to_the_bit(ranks: Any, tmp_path: Any, name: str) -> None:
    """Before, at and after a meeting, and with a result that is not taken over yet."""
    options = RESUMED[name]

    def uneven(step: int) -> Any:
        """The replicas' shares are to each other as 2:2:2, 3:2:2 or 3:3:2."""
        return my_share(step, 6 + step % 3)

    def job() -> None:
        engine = wide_engine(options)
        for step in range(9):
            engine.step(uneven(step))
            if 3 <= step + 1 <= 7:
                with paceline.Checkpoints(tmp_path / str(step + 1), engine) as checkpoints:
                    checkpoints.save(wait=True)
        expected = everything(engine)
        for at in range(3, 8):
            resumed = wide_engine(options)
            with paceline.Checkpoints(tmp_path / str(at), resumed) as checkpoints:
                checkpoints.restore()
            assert resumed.steps_done == at
            for step in range(at, 9):
                resumed.step(uneven(step))
            for key, value in everything(resumed).items():
                assert torch.equal(value, expected[key]), (at, key)

    ranks(job)


@pytest.mark.parametrize("name", ["diloco", "fragments and overlap", "quantised"])
def test_another_number_of_replicas_goes_on_from_where_the_saved_ones_meet(
    ranks: Any, tmp_path: Any, name: str
) -> None:
    """2, then 3, then 1: whatever replicas learned since they met last is in the model."""
    options = RESUMED[name]

    def job(source: str | None, steps: int, target: str) -> Any:
        engine = wide_engine(options)
        loaded = None
        if source is not None:
            with paceline.Checkpoints(tmp_path / source, engine) as checkpoints:
                checkpoints.restore()
            loaded = everything(engine)
            sync = internals_of(engine).sync
            assert isinstance(sync, LocalSGD)
            assert sync.state.notes
        while engine.steps_done < steps:
            engine.step(my_share(engine.steps_done))
        with paceline.Checkpoints(tmp_path / target, engine) as checkpoints:
            checkpoints.save(wait=True)
        engine.meet()
        return loaded, everything(engine)

    two = ranks(job, None, 5, "two", world_size=2)
    three = ranks(job, "two", 10, "three", world_size=3)
    one = ranks(job, "three", 11, "one", world_size=1)
    exact = {"rtol": 0.0, "atol": 0.05 if name == "quantised" else 1e-12}
    for before, after in ((two, three), (three, one)):
        for loaded, _ in after:
            for key, value in before[0][1].items():
                if value.is_floating_point():
                    torch.testing.assert_close(loaded[key], value, **exact)
                    assert torch.equal(loaded[key], after[0][0][key])  # on all replicas


@pytest.mark.world(2)
def test_nothing_that_was_not_sent_is_lost_in_a_rescale(ranks: Any, tmp_path: Any) -> None:
    options = paceline.LocalSteps(every=2, exchange="int8")

    def residuals(engine: paceline.Engine) -> dict[str, torch.Tensor]:
        sync = internals_of(engine).sync
        assert isinstance(sync, LocalSGD)
        found = sync.loop.exchanges[0].memory.residuals
        return {name: value.clone() for name, value in found.items()}

    def save() -> Any:
        engine = wide_engine(options)
        for step in range(4):
            engine.step(my_share(step))
        with paceline.Checkpoints(tmp_path, engine) as checkpoints:
            checkpoints.save(wait=True)
        return residuals(engine)

    def load() -> Any:
        engine = wide_engine(options)
        with paceline.Checkpoints(tmp_path, engine) as checkpoints:
            checkpoints.restore()
        return residuals(engine)

    before, after = ranks(save), ranks(load, world_size=3)
    assert before[0]
    for name in before[0]:
        mean = sum(own[name] for own in before) / 2
        assert mean.abs().max() > 0
        torch.testing.assert_close(sum(own[name] for own in after) / 3, mean, **EXACT)


@pytest.mark.world(2)
def test_half_precision_scales_each_replica_by_itself(ranks: Any, tmp_path: Any) -> None:
    """One replica's overflow lowers its own scale; a resume keeps each replica's."""

    def engine_of() -> paceline.Engine:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=sgd(model),
            precision="fp16",
            local_steps=4,
        )

    def job() -> Any:
        rank = paceline.World.current().rank
        engine = engine_of()
        skipped = []
        for step in range(6):
            x, y = my_share(step)
            x = x.float() * (3e4 if step == 1 and rank == 1 else 1.0)
            skipped.append(engine.step((x, y)).skipped)
        with paceline.Checkpoints(tmp_path, engine) as checkpoints:
            checkpoints.save(wait=True)
        resumed = engine_of()
        with paceline.Checkpoints(tmp_path, resumed) as checkpoints:
            checkpoints.restore()
        ends = []
        for one in (engine, resumed):
            for step in range(6, 9):
                x, y = my_share(step)
                one.step((x.float(), y))
            ends.append((internals_of(one).context.precision.scaler.get_scale(), everything(one)))
        assert ends[0][0] == ends[1][0]
        assert all(torch.equal(ends[0][1][key], ends[1][1][key]) for key in ends[0][1])
        return skipped, ends[0][0]

    (skipped, scale), (skipped_too, lower) = ranks(job)
    assert skipped == skipped_too == [False, True, False, False, False, False]
    assert scale == 2 * lower


@pytest.mark.world(2)
def test_state_dict_is_that_of_the_shared_model(ranks: Any) -> None:
    def job() -> Any:
        engine = make_engine(local_steps=4)
        for step in range(4):
            engine.step(my_share(step))
        met = everything(engine)
        engine.step(my_share(4))
        saved = engine.state_dict()["model"]
        assert all(torch.equal(saved[key], met[key]) for key in met)
        assert not all(torch.equal(value, met[key]) for key, value in everything(engine).items())
        return met

    first, second = ranks(job)
    assert all(torch.equal(first[key], second[key]) for key in first)
