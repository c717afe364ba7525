"""Training with replicas that step alone: events, evaluation, signals, resume, the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.launch.exit_codes import PEER_LEAVES, TOLD_TO_LEAVE
from paceline.sync.deferred_numbers import LAG

STEPS = 24


def dataset(n: int = 42) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
    ).double()


class Doing(paceline.Callback):
    """Does something after a step."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        self._action = action

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self._action(trainer)


def make_trainer(
    local_steps: Any, run_dir: Path | None = None, after: Any = None, **options: Any
) -> paceline.Trainer:
    model = build()
    return paceline.Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss=F.cross_entropy,
        global_batch=7,
        run_dir=run_dir,
        progress=False,
        local_steps=local_steps,
        callbacks=[] if after is None else [Doing(after)],
        **options,
    )


def state_of(trainer: paceline.Trainer) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.world(3)
def test_events_tell_the_loss_of_all_replicas_once_in_order(ranks: Any, tmp_path: Path) -> None:
    """At rate 0 nothing moves, so that the loss is what it is without local steps."""

    def job(local_steps: Any, folder: Path) -> Any:
        model = nn.Linear(4, 2).double()
        with torch.no_grad():
            model.weight.copy_(torch.arange(8).view(2, 4) / 10)
            model.bias.zero_()
        trainer = paceline.Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            loss=F.cross_entropy,
            global_batch=7,
            run_dir=folder,
            progress=False,
            local_steps=local_steps,
        )
        history = trainer.fit(dataset(), epochs=4)
        return history.losses, [e.loss for e in history.epochs]

    together = ranks(job, None, tmp_path / "together")
    apart = ranks(job, paceline.LocalSteps(every=10), tmp_path / "apart")
    for found in apart:
        torch.testing.assert_close(found, together[0], rtol=0, atol=1e-12)
    told = [e for e in events.read(tmp_path / "apart") if isinstance(e, events.StepDone)]
    assert [e.step for e in told] == list(range(1, STEPS + 1))
    assert {e.samples for e in told} == {7}


@pytest.mark.parametrize(
    "options", [{"every": 5}, {"every": 6, "fragments": 3, "overlap": 2, "exchange": "int8"}]
)
@pytest.mark.world(2)
def test_at_the_end_there_is_one_model_and_it_is_what_was_evaluated_and_saved(
    ranks: Any, tmp_path: Path, options: Any
) -> None:
    def job() -> Any:
        trainer = make_trainer(
            paceline.LocalSteps(**options),
            tmp_path / "run",
            evaluation=paceline.Evaluation(every=8),
        )
        history = trainer.fit(dataset(), dataset(14), steps=STEPS)
        trainer.model.eval()
        x, y = dataset(14).tensors
        loss = float(F.cross_entropy(trainer.model(x), y))
        fresh = build()
        optimizer = torch.optim.Adam(fresh.parameters())
        engine = paceline.Engine(fresh, loss=F.cross_entropy, optimizer=optimizer)
        paceline.load_weights(engine, tmp_path / "run")
        saved = {k: v.clone() for k, v in fresh.state_dict().items()}
        return state_of(trainer), history.evals[-1].metrics["loss"], loss, saved

    first, second = ranks(job)
    for state, told, loss, saved in (first, second):
        assert told == pytest.approx(loss, abs=1e-12)
        for key, value in state.items():
            if value.is_floating_point():
                assert torch.equal(value, first[0][key])
                assert torch.equal(value, saved[key])


@pytest.mark.world(2)
def test_an_evaluation_in_a_round_is_that_of_the_shared_model_and_changes_nothing(
    ranks: Any,
) -> None:
    """Steps 5 to 8 are after the meeting at 4 and before the one at 8: one and the same loss."""

    def job(every: int | None) -> Any:
        evaluation = paceline.Evaluation(every=every)
        trainer = make_trainer(paceline.LocalSteps(every=4), evaluation=evaluation)
        history = trainer.fit(dataset(), dataset(14), steps=12)
        evaluated = {e.step: e.metrics["loss"] for e in history.evals}
        return history.losses, state_of(trainer), evaluated

    often, never = ranks(job, 1), ranks(job, 100)
    for (losses, state, by_step), (expected, end, _) in zip(often, never, strict=True):
        assert losses == expected
        assert same(state, end)
        assert by_step == often[0][2]
        assert by_step[5] == by_step[6] == by_step[7] == by_step[4]
        assert by_step[8] != by_step[7]


SETTINGS = {
    "rounds": paceline.LocalSteps(every=20),
    "overlap": paceline.LocalSteps(every=4, fragments=2, overlap=3, exchange="int8"),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.world(2)
def test_a_signal_in_a_round_saves_on_all_ranks_at_one_step_and_the_run_goes_on_to_the_bit(
    ranks: Any, tmp_path: Path, name: str, number: int
) -> None:
    def job(folder: Path, at: int | None, resume: bool) -> Any:
        rank = paceline.World.current().rank

        def interrupt(trainer: paceline.Trainer) -> None:
            if trainer.step == at and rank == 1:
                signal.raise_signal(number)

        trainer = make_trainer(SETTINGS[name], folder, interrupt)
        try:
            history = trainer.fit(dataset(), dataset(14), steps=STEPS, resume=resume)
        except SystemExit as left:
            return trainer.step, left.code
        except KeyboardInterrupt:
            return trainer.step, "Ctrl-C"
        return history.losses, state_of(trainer)

    whole = ranks(job, tmp_path / "whole", None, False)
    left = ranks(job, tmp_path / "left", 3, False)
    codes = ["Ctrl-C"] * 2 if number == signal.SIGINT else [PEER_LEAVES, TOLD_TO_LEAVE]
    assert [code for _, code in left] == codes
    steps = {step for step, _ in left}
    assert len(steps) == 1
    assert 3 <= steps.pop() <= 3 + LAG
    resumed = ranks(job, tmp_path / "left", None, True)
    for (losses, state), (expected, end) in zip(resumed, whole, strict=True):
        assert losses == expected
        assert same(state, end)
    told = [e.step for e in events.read(tmp_path / "left") if isinstance(e, events.StepDone)]
    assert told == list(range(1, STEPS + 1))


@pytest.mark.world(2)
def test_a_callback_that_stops_the_run_in_a_round_leaves_one_model(
    ranks: Any, tmp_path: Path
) -> None:
    """The last meeting comes after the save of that step, which is made anew."""

    def job() -> Any:
        def stop(trainer: paceline.Trainer) -> None:
            if trainer.step == 5 and paceline.World.current().rank == 1:
                trainer.stop("enough")

        trainer = make_trainer(
            paceline.LocalSteps(every=50),
            tmp_path / "run",
            stop,
            checkpoint=paceline.Checkpointing(every=1, keep=2),
        )
        history = trainer.fit(dataset(), dataset(14), steps=STEPS)
        step, end = trainer.step, state_of(trainer)
        fresh = build()
        optimizer = torch.optim.Adam(fresh.parameters())
        engine = paceline.Engine(fresh, loss=F.cross_entropy, optimizer=optimizer)
        paceline.load_weights(engine, tmp_path / "run")
        return step, history.reason, end, {k: v.clone() for k, v in fresh.state_dict().items()}

    first, second = ranks(job)
    assert first[:2] == second[:2] == (5, "stopped")
    for _, _, end, saved in (first, second):
        for key, value in end.items():
            if value.is_floating_point():
                assert torch.equal(value, first[2][key])
                assert torch.equal(value, saved[key])


@pytest.mark.world(2)
def test_a_trainer_runs_ahead_of_one_that_stands_still(ranks: Any, tmp_path: Path) -> None:
    """Rank 1 waits after step 2 until rank 0 has done six more; with events, splits, agreement."""

    def job() -> Any:
        mark = tmp_path / "ahead"
        rank = paceline.World.current().rank

        def wait(trainer: paceline.Trainer) -> None:
            if rank == 0 and trainer.step == 2 + LAG - 2:
                mark.touch()
            if rank == 1 and trainer.step == 2:
                deadline = time.monotonic() + 150
                while not mark.exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)

        trainer = make_trainer(paceline.LocalSteps(every=20), tmp_path / "run", wait, split_every=4)
        history = trainer.fit(dataset(420), steps=STEPS)
        return history.losses

    first, second = ranks(job)
    assert first == second
    splits = [e.step for e in events.read(tmp_path / "run") if isinstance(e, events.StepSplit)]
    assert splits == [8, 12, 16, 20, 24]


@pytest.mark.world(2)
def test_a_rank_that_fails_in_a_round_takes_the_run_down_at_once(ranks: Any) -> None:
    """With numbers and requests of other steps on their way, which never arrive."""

    def job() -> Any:
        def fail(trainer: paceline.Trainer) -> None:
            if trainer.step == 5 and paceline.World.current().rank == 1:
                raise ValueError("nobody expected this")

        trainer = make_trainer(paceline.LocalSteps(every=50), None, fail)
        trainer.fit(dataset(), steps=STEPS)

    ranks(int)  # the pool is up
    started = time.monotonic()
    with pytest.raises(paceline.errors.RankFailed, match="nobody expected this"):
        ranks(job)
    assert time.monotonic() - started < 100, "not when the pool gives up"


@pytest.mark.world(2)
def test_a_saved_run_of_replicas_goes_on_without_them_and_the_other_way_round(
    ranks: Any, tmp_path: Path
) -> None:
    def job(local_steps: Any, steps: int, resume: bool) -> Any:
        trainer = make_trainer(local_steps, tmp_path / "run")
        history = trainer.fit(dataset(), dataset(14), steps=steps, resume=resume)
        return history.losses, state_of(trainer)

    ranks(job, paceline.LocalSteps(every=4), 8, False)
    ranks(job, None, 12, True)
    first, second = ranks(job, paceline.LocalSteps(every=4), 18, True)
    assert len(first[0]) == len(second[0]) == 18
    assert all(map(torch.isfinite, map(torch.tensor, first[0])))
    assert torch.equal(first[1]["0.weight"], second[1]["0.weight"])
