"""What ``fit`` in one process leaves behind, ``fit(nproc=N)`` leaves behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import RankFailed, TrainingError
from paceline.trainer import fit_processes


class Watcher(paceline.Callback):
    """Collects, counts, keeps references; may fail, or press Ctrl-C, after a step."""

    def __init__(self, losses: list[float], model: nn.Module, **ends: int) -> None:
        self.losses, self.model, self.ends = losses, model, ends
        self.count = 0
        self.trainer: Any = None

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.losses.append(result.loss)
        self.count, self.trainer = self.count + 1, trainer
        if trainer.step == self.ends.get("fail"):
            raise ValueError("as asked")
        if trainer.step == self.ends.get("interrupt"):
            os.kill(os.getpid(), signal.SIGINT)


class Tally:
    """Something of the user's own that is saved."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


class Adds(paceline.Callback):
    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.tally.total += 1


def make(layout: str = "auto", run_dir: Path | None = None, **ends: int) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model.register_buffer("seen", torch.zeros(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    tally = Tally()
    return paceline.Trainer(
        model,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        global_batch=8,
        layout=layout,
        run_dir=run_dir,
        progress=False,
        schedule=paceline.schedules.every("step", torch.optim.lr_scheduler.StepLR(optimizer, 2)),
        callbacks=[Watcher([], model, **ends), Adds(tally)],
        objects={"tally": tally},
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(32, 4, generator=generator), torch.randint(2, (32,), generator=generator)
    )


@pytest.fixture
def on_pool(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the shared pool stand in for processes that would have to be started."""

    def call(function: Any, *, nproc: int, **_: Any) -> Any:
        try:
            return ranks(function, world_size=nproc, join=False)[0]
        except RankFailed as error:
            if "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from None
            raise

    monkeypatch.setattr(fit_processes.local, "call", call)


def assert_same(found: paceline.Trainer, wanted: paceline.Trainer) -> None:
    assert (found.step, found.epoch) == (wanted.step, wanted.epoch)
    for name, value in wanted.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    own, theirs = found.optimizer.state_dict(), wanted.optimizer.state_dict()
    assert own["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(own["state"][number][key], value, rtol=1e-4, atol=1e-6)
    assert [g["lr"] for g in own["param_groups"]] == [g["lr"] for g in theirs["param_groups"]]
    schedules = [t.engine_options["schedule"].schedule.last_epoch for t in (found, wanted)]
    assert schedules[0] == schedules[1]
    watcher, other = found.callbacks[0], wanted.callbacks[0]
    assert watcher.count == other.count
    assert watcher.losses == pytest.approx(other.losses, rel=1e-4)
    assert watcher.model is found.model
    assert watcher.trainer is found
    assert found.objects["tally"].total == wanted.objects["tally"].total
    assert found.callbacks[1].tally is found.objects["tally"]


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2"])
@pytest.mark.usefixtures("on_pool")
def test_after_success_all_is_as_in_one_process_and_goes_on(layout: str) -> None:
    found, wanted = make(layout), make()
    losses = found.callbacks[0].losses
    with pytest.raises(TrainingError, match="no engine before fit"):
        _ = found.engine
    history = found.fit(data(), steps=5, nproc=2)
    reference = wanted.fit(data(), steps=5)
    assert history.losses == pytest.approx(reference.losses, rel=1e-4)
    assert_same(found, wanted)
    assert losses is found.callbacks[0].losses, "the list that the caller holds is the one filled"
    # The ability to go on: an engine of this process alone.
    assert str(found.engine.layout) == "dp=1"
    assert found.engine.steps_done == found.step == 5
    batch = data()[:8]
    assert found.engine.step(batch).loss == pytest.approx(wanted.engine.step(batch).loss, rel=1e-4)
    assert found.engine.state_dict()["step"] == 6
    # And fit again.
    for trainer in (found, wanted):
        trainer.fit(data(), steps=2, nproc=2 if trainer is found else None)
    assert_same(found, wanted)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "pp=2"])
@pytest.mark.usefixtures("on_pool")
def test_after_a_failure_what_was_learned_is_there(layout: str) -> None:
    found, wanted = make(layout, fail=3), make(fail=3)
    with pytest.raises(RankFailed, match="as asked"):
        found.fit(data(), steps=5, nproc=2)
    with pytest.raises(ValueError, match="as asked"):
        wanted.fit(data(), steps=5)
    assert found.step == 3
    assert_same(found, wanted)
    assert found.engine.steps_done == 3


@pytest.mark.usefixtures("on_pool")
def test_after_ctrl_c_without_a_run_folder_the_model_has_learned() -> None:
    found, wanted = make("dp=2,zero=3", interrupt=2), make(interrupt=2)
    for trainer, nproc in ((found, 2), (wanted, None)):
        with pytest.raises(KeyboardInterrupt, match="stopped at step 2"):
            trainer.fit(data(), steps=5, nproc=nproc)
    assert_same(found, wanted)


@pytest.mark.usefixtures("on_pool")
def test_early_stopping_and_a_factory() -> None:
    def run(nproc: int | None) -> tuple[paceline.Trainer, paceline.History]:
        torch.manual_seed(0)
        trainer = paceline.Trainer(
            nn.Linear(4, 2),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
            loss=nn.CrossEntropyLoss(),
            global_batch=8,
            progress=False,
            callbacks=[paceline.EarlyStopping(patience=2)],
        )
        return trainer, trainer.fit(data(), data(), epochs=9, nproc=nproc)

    (found, history), (wanted, reference) = run(2), run(None)
    assert history.reason == reference.reason == "stopped"
    assert (found.step, found.epoch) == (wanted.step, wanted.epoch)
    assert found.callbacks[0].waited == wanted.callbacks[0].waited == 2
    assert isinstance(found.optimizer, torch.optim.SGD)
    assert len(found.optimizer.state) == 2


@pytest.mark.usefixtures("on_pool")
def test_what_cannot_come_back_is_named() -> None:
    class Locks(paceline.Callback):
        def __init__(self) -> None:
            self.lock: Any = None

        def on_fit_start(self, trainer: Any) -> None:
            self.lock = threading.Lock()

    found = make("dp=2")
    found.callbacks.append(Locks())
    with pytest.warns(UserWarning, match=r"not brought back from the ranks: Locks\.lock \(Type"):
        found.fit(data(), steps=1, nproc=2)
    assert found.callbacks[-1].lock is None
