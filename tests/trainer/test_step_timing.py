"""Where a step's time goes on each rank, and who is named for being slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import paceline
from engine.test_layouts import batches, make_engine, make_gpt, own_share
from paceline import events
from paceline.diagnose.pulse import PHASES
from paceline.errors import TrainingError
from paceline.models.gpt import token_cross_entropy

SLOW_RANK, DELAY = 1, 0.15


class Texts(Dataset[Any]):
    """Random tokens, which take this rank their time."""

    def __init__(self, seconds: float) -> None:
        draw = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, 33, (64, 9), generator=draw)
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._tokens[index, :-1], self._tokens[index, 1:]


class Dawdles(paceline.Callback):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_end(self, trainer: Any, result: Any) -> None:
        time.sleep(self._seconds)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY)
        return grad


def train(run_dir: Path, layout: str, phase: str | None, split_every: int | None) -> None:
    """Twelve steps, of which one rank takes longer in ``phase``."""
    slow = paceline.World.current().rank == SLOW_RANK
    model = make_gpt(layers=2)
    middle = model.get_submodule("blocks.1") if slow else None
    if middle is not None and phase == "forward":
        middle.register_forward_hook(lambda *_: time.sleep(DELAY))
    if middle is not None and phase == "backward":
        middle.register_forward_hook(lambda module, args, output: SlowBackward.apply(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if slow and phase == "optimizer":
        optimizer.register_step_post_hook(lambda *_: time.sleep(DELAY))
    paceline.Trainer(
        model,
        optimizer=optimizer,
        loss=token_cross_entropy,
        layout=layout,
        global_batch=4,
        run_dir=run_dir,
        callbacks=[Dawdles(DELAY if slow and phase == "other" else 0.0)],
        split_every=split_every,
        progress=False,
    ).fit(Texts(DELAY / 2 if slow and phase == "data" else 0.0), steps=12)


def told(run_dir: Path, kind: type[Any]) -> list[Any]:
    return [event for event in events.read(run_dir) if isinstance(event, kind)]


CASES = [
    *(("dp=2", phase) for phase in PHASES if phase != "waiting"),
    *(("dp=2,zero=3", phase) for phase in ("data", "forward")),
    ("tp=2", "data"),
    ("pp=2", "data"),
]


@pytest.mark.world(2)
@pytest.mark.parametrize(("layout", "phase"), CASES)
def test_slow_rank_is_named_where_it_is_slow(
    ranks: Any, tmp_path: Path, layout: str, phase: str
) -> None:
    ranks(train, tmp_path, layout, phase, 3)
    splits = told(tmp_path, events.StepSplit)
    assert [(split.step, split.steps) for split in splits][-3:] == [(6, 3), (9, 3), (12, 3)]
    for split in splits[-2:]:
        assert set(split.phases) == set(PHASES)
        assert split.phases[phase][SLOW_RANK] >= 0.9 * DELAY
        assert split.phases["waiting"][1 - SLOW_RANK] >= 0.5 * DELAY
    [straggler] = told(tmp_path, events.Straggler)[:1]
    assert (straggler.rank, straggler.phase) == (SLOW_RANK, phase)
    assert straggler.costs >= 0.5 * DELAY
    assert straggler.factor > 1.2


@pytest.mark.world(4)
def test_stage_of_a_pipeline_that_is_slower_than_its_like(ranks: Any, tmp_path: Path) -> None:
    ranks(train, tmp_path, "dp=2,pp=2", "data", 3)
    assert {s.rank for s in told(tmp_path, events.Straggler)} == {SLOW_RANK}


def test_one_process_is_split_and_names_nobody(tmp_path: Path) -> None:
    train(tmp_path / "split", "dp=1", None, 5)
    splits = told(tmp_path / "split", events.StepSplit)
    assert [(split.step, split.steps) for split in splits] == [(10, 5)]  # the first step is none
    steps = [e.seconds for e in told(tmp_path / "split", events.StepDone)][5:10]
    whole = sum(seconds for [seconds] in splits[0].phases.values())
    assert whole == pytest.approx(sum(steps) / 5, rel=0.5, abs=0.02)
    assert told(tmp_path / "split", events.Straggler) == []
    train(tmp_path / "whole", "dp=1", None, None)
    assert told(tmp_path / "whole", events.StepSplit) == []


def test_split_every_must_be_a_number_of_steps() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TrainingError, match=r"^split_every=0 must be a whole number, 1"):
        paceline.Trainer(model, optimizer=torch.optim.SGD, split_every=0)


def own_loop(layout: str) -> Any:
    """What the pulse of a rank tells while a loop of one's own trains and evaluates."""
    engine = make_engine(layout, layers=2)
    pulse = engine.world.pulse
    seen: list[str] = []
    pulse.listener = seen.append
    moves = pulse.moves
    for batch in batches(2):
        engine.step(own_share(batch, engine.layout))
    after = pulse.phase
    with engine.evaluating():
        before_batch = pulse.moves
        engine.evaluate(own_share(batches(1)[0], engine.layout))
        evaluating = pulse.phase, pulse.moves > before_batch
    pulse.listener = None
    return pulse.step, after, evaluating, pulse.phase, set(seen), pulse.moves - moves


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_loop_of_ones_own_has_a_pulse(ranks: Any, layout: str) -> None:
    for step, after, evaluating, at_end, seen, moves in ranks(own_loop, layout):
        assert step == 2
        assert after == at_end == "data"  # what comes between steps
        assert evaluating == ("evaluation", True)
        assert seen == {"forward", "waiting", "backward", "optimizer", "data", "evaluation"}
        assert moves >= 2 * 6
