"""Averaged weights: as one process keeps them, on every layout, through checkpoints and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from engine.test_layouts import batches, make_engine, make_gpt, own_share
from paceline.engine.internals import internals_of
from paceline.errors import LayoutError, TrainingError
from paceline.models.gpt import token_cross_entropy

DECAY = 0.7
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def by_hand(steps: int, every: int = 1, start: int = 0) -> tuple[dict[str, Tensor], Any]:
    """The average as torch.optim.swa_utils keeps it, of a model on one process; and that model."""
    engine = make_engine("dp=1")
    multi = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    average = torch.optim.swa_utils.AveragedModel(engine.model, multi_avg_fn=multi)
    if start == 0:
        average.update_parameters(engine.model)  # begins as a copy
    for step, batch in enumerate(batches(steps), 1):
        engine.step(batch)
        if step >= start and (step - start) % every == 0:
            average.update_parameters(engine.model)
    return dict(average.module.named_parameters()), engine


def train(engine: paceline.Engine, steps: int) -> None:
    for batch in batches(steps)[engine.steps_done :]:
        engine.step(own_share(batch, engine.layout))


def losses(engine: paceline.Engine, weights: Any) -> float:
    """The loss of the first batch, over all ranks."""
    with engine.evaluating(weights=weights):
        found = engine.evaluate(own_share(batches(1)[0], engine.layout))
    own = [sum(float(part.term.total) for part in found), sum(float(p.term.count) for p in found)]
    total, count = (sum(n) for n in zip(*paceline.collectives.all_gather_object(own), strict=True))
    return total / count


@pytest.mark.parametrize(("every", "start"), [(1, 0), (2, 0), (1, 2), (2, 1)])
def test_it_is_what_torch_averages(every: int, start: int) -> None:
    expected, _ = by_hand(5, every, start)
    engine = make_engine("dp=1", ema=paceline.EMA(DECAY, every=every, start=start))
    train(engine, 5)
    found = engine.whole_parameters(weights="ema")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.world(2)
def test_every_layout_has_the_average_of_one_process(ranks: Any, tmp_path: Path) -> None:
    """Trained, saved, and taken over by the next layout in the middle; sharded where it is."""
    layouts = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"]

    def job() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, layout in enumerate(layouts):
            engine = make_engine(layout, ema=DECAY)
            where = tmp_path / str(number)
            with paceline.Checkpoints(where, engine) as checkpoints:
                train(engine, 3)
                before = engine.whole_parameters()
                loss = losses(engine, "ema"), losses(engine, "model")
                after = engine.whole_parameters()
                same = all(torch.equal(after[name], before[name]) for name in before)
                checkpoints.save(wait=True)
            memory = engine.memory()[0]
            moments = 2 * memory.parameters
            found[layout] = (
                engine.whole_parameters(weights="ema"),
                loss,
                same,
                abs(memory.optimizer - moments - memory.parameters) < 1000,
            )
            other = make_engine(layouts[(number + 1) % len(layouts)], ema=DECAY)
            with paceline.Checkpoints(where, other) as checkpoints:
                checkpoints.restore()
                train(other, 5)
            found[layout] += (other.whole_parameters(weights="ema"),)
        with torch.device("meta"):
            unmade = make_gpt()
        late = paceline.Engine(
            unmade, loss=token_cross_entropy, layout="tp=2", precision="fp64", ema=DECAY
        )
        paceline.load_weights(late, where)  # waits for the first batch, which this is
        found["meta"] = losses(late, "ema"), losses(late, "model")
        train(engine, 5)  # the last one, on its own and resumed
        again = make_engine(layout, ema=DECAY)
        with paceline.Checkpoints(where, again) as checkpoints:
            checkpoints.restore()
            train(again, 5)
        went_on, exact = (e.whole_parameters(weights="ema") for e in (engine, again))
        assert all(torch.equal(exact[name], went_on[name]) for name in exact)
        return found

    expected, alone = by_hand(3)
    at_five, _ = by_hand(5)
    with torch.no_grad():
        model_loss = losses(alone, "model")
        alone.model.load_state_dict({**alone.model.state_dict(), **expected})
        ema_loss = losses(alone, "model")
    assert abs(model_loss - ema_loss) > 1e-4
    on_layouts = ranks(job)[1]
    assert on_layouts.pop("meta") == pytest.approx((ema_loss, model_loss), rel=1e-9)
    for layout, found in on_layouts.items():
        average, loss, same, is_small, resumed = found
        assert same, f"{layout}: evaluating the average changed the model"
        assert is_small, f"{layout}: a rank holds more of the average than of the model"
        assert loss == pytest.approx((ema_loss, model_loss), rel=1e-9), layout
        for name, value in expected.items():
            torch.testing.assert_close(average[name], value.detach(), **CLOSE)
            torch.testing.assert_close(resumed[name], at_five[name].detach(), **CLOSE)


def test_what_is_frozen_has_no_average_until_it_is_trained() -> None:
    engine = make_engine("dp=1", ema=DECAY)
    block = engine.model.blocks[0]
    block.requires_grad_(False)
    train(engine, 2)
    average = internals_of(engine).context.average
    assert average is not None
    assert not any(average.of(f"blocks.0.{name}") for name, _ in block.named_parameters())
    assert average.of("blocks.1." + next(name for name, _ in block.named_parameters()))
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    block.requires_grad_(True)
    train(engine, 3)
    found = engine.whole_parameters(weights="ema")
    for name, parameter in engine.model.named_parameters():
        if name.startswith("blocks.0."):
            torch.testing.assert_close(
                found[name], before[name].lerp(parameter.detach(), 1 - DECAY)
            )


def test_a_model_in_half_precision_is_averaged_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = paceline.Engine(model, optimizer=optimizer, loss=nn.MSELoss(), ema=0.999)
    for _ in range(3):
        engine.step((torch.randn(4, 4).bfloat16(), torch.randn(4, 2).bfloat16()))
    found = engine.whole_parameters(weights="ema")["weight"]
    assert found.dtype == torch.float32
    own = model.weight.detach().clone()
    with engine.evaluating(weights="ema"):
        assert torch.equal(model.weight, found.bfloat16())
    assert torch.equal(model.weight, own)
    assert torch.equal(engine.whole_parameters(weights="ema")["weight"], found)


def test_refusals() -> None:
    engine = make_engine("dp=1", ema=DECAY)
    train(engine, 1)
    with engine.evaluating(weights="ema"), pytest.raises(TrainingError, match="Leave that block"):
        engine.state_dict()
    with (
        engine.evaluating(weights="ema"),
        pytest.raises(TrainingError, match="step: the model has"),
    ):
        engine.step(batches(1)[0])
    with (
        pytest.raises(TrainingError, match="keeps no average"),
        make_engine("dp=1").evaluating("ema"),
    ):
        pass
    with pytest.raises(TrainingError, match="must be 'model' or 'ema'"):
        engine.whole_parameters(weights="best")  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"ema: decay=1.5 must be a number from 0 to below 1"):
        make_engine("dp=1", ema=1.5)
    with pytest.raises(LayoutError, match="no one model to average"):
        make_engine("dp=1", ema=DECAY, local_steps=4)
