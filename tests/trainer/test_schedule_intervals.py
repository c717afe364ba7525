"""What a schedule counts: steps, epochs or evaluations, as in a loop of plain torch."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

import paceline
from paceline import schedules
from paceline.config import load
from paceline.errors import CheckpointError, ConfigError, TrainingError
from paceline.trainer.config_parts import make_optimizer, make_schedule, unsaid_interval

EPOCHS, PER_EPOCH = 4, 3


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(samples, 3, generator=generator, dtype=torch.float64),
        torch.randn(samples, 1, generator=generator, dtype=torch.float64),
    )


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def warm(optimizer: torch.optim.Optimizer) -> SequentialLR:
    rise = LinearLR(optimizer, 0.5, total_iters=2)
    return SequentialLR(optimizer, [rise, StepLR(optimizer, 1, 0.5)], milestones=[2])


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: schedules.every("step", warm(optimizer)),
    "epoch": lambda optimizer: schedules.every("epoch", warm(optimizer)),
    "class": lambda optimizer: schedules.every("epoch", StepLR, step_size=1, gamma=0.5),
    "factory": lambda optimizer: schedules.every("epoch", warm),
    "function": lambda optimizer: schedules.every("epoch", lambda epoch: 0.5**epoch),
    "evaluation": lambda optimizer: schedules.every(
        "evaluation", plateau(optimizer), metric="loss"
    ),
}


def in_plain_torch(name: str) -> tuple[list[float], list[float]]:
    """Rates and losses of the same run, written by hand."""
    model, optimizer = parts()
    made: Any = {"evaluation": plateau, "class": lambda o: StepLR(o, 1, 0.5)}.get(name, warm)
    if name == "function":
        made = lambda o: StepLR(o, 1, 0.5)  # noqa: E731
    scheduler = made(optimizer)
    x, y = data(12, 1).tensors
    rates, losses = [], []
    for _ in range(EPOCHS):
        for start in range(0, 12, 4):
            rates.append(optimizer.param_groups[0]["lr"])
            loss = nn.functional.mse_loss(model(x[start : start + 4]), y[start : start + 4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if name == "step":
                scheduler.step()
        if name == "evaluation":
            x_val, y_val = data(5, 2).tensors
            scheduler.step(nn.functional.mse_loss(model(x_val), y_val).item())
        elif name != "step":
            scheduler.step()
    return rates, losses


class Interrupt(paceline.Callback):
    """Ctrl-C after a step."""

    def __init__(self, at: int | None) -> None:
        self._at = at

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.step == self._at:
            signal.raise_signal(signal.SIGINT)


def run(name: str, run_dir: Path, stop_at: int | None = None, *, resume: bool = False) -> Any:
    model, optimizer = parts()
    trainer = paceline.Trainer(
        model,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        global_batch=4,
        precision="fp64",
        run_dir=run_dir,
        schedule=SCHEDULES[name](optimizer),
        data=paceline.DataOptions(shuffle=False),
        callbacks=[Interrupt(stop_at)],
        progress=False,
    )
    try:
        history = trainer.fit(data(12, 1), data(5, 2), epochs=EPOCHS, resume=resume)
    except KeyboardInterrupt:
        return None
    return [step.lr for step in history.steps], history.losses, model.weight.tolist()


def every_schedule(root: Path) -> Any:
    """Each schedule in one go, and interrupted: at the end of an epoch and in its middle."""
    found = {}
    for number, name in enumerate(SCHEDULES):
        found[name] = run(name, root / name)
        stop = PER_EPOCH * 2 if number % 2 else PER_EPOCH * 2 + 1
        assert run(name, root / f"{name}-stopped", stop) is None
        assert run(name, root / f"{name}-stopped", resume=True) == found[name], name
    return found


def test_rates_and_losses_are_those_of_plain_torch(ranks: Any, tmp_path: Path) -> None:
    results = ranks(every_schedule, tmp_path, world_size=2, timeout=170)
    for found in results:
        for name, (rates, losses, _) in found.items():
            wanted_rates, wanted_losses = in_plain_torch(name)
            assert rates == pytest.approx(wanted_rates, rel=1e-12), name
            assert losses == pytest.approx(wanted_losses, rel=1e-9), name
    assert len(set(results[0]["epoch"][0])) < len(set(results[0]["step"][0])) + 2
    assert len(set(results[0]["evaluation"][0])) > 1


def engine(schedule: Any, optimizer: torch.optim.Optimizer | None = None) -> paceline.Engine:
    model = nn.Linear(3, 1, dtype=torch.float64)
    made = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return paceline.Engine(model, loss=nn.MSELoss(), optimizer=made, schedule=schedule)


def step(engine: paceline.Engine) -> float:
    return engine.step(data(2, 0).tensors).lr


def test_an_engine_is_told_of_epochs_and_evaluations() -> None:
    one = engine(schedules.every("epoch", StepLR, step_size=1, gamma=0.5))
    assert [step(one), step(one)] == [1.0, 1.0]
    one.epoch_done()
    one.evaluated({"loss": 3.0})  # nobody asked for it
    assert step(one) == 0.5
    two = engine(
        schedules.every(
            "evaluation", ReduceLROnPlateau, metric="accuracy", mode="max", patience=0, factor=0.5
        )
    )
    for accuracy, rate in ((0.5, 1.0), (0.6, 1.0), (0.6, 0.5)):
        two.evaluated({"loss": 1.0, "accuracy": accuracy})
        assert step(two) == rate
    with pytest.raises(TrainingError, match=r"watches the metric 'accuracy'.* gave loss"):
        two.evaluated({"loss": 1.0})


def test_what_is_counted_is_part_of_the_state() -> None:
    by_step = engine(schedules.every("step", StepLR, step_size=2))
    by_epoch = engine(schedules.every("epoch", StepLR, step_size=2))
    unsaid = engine(None)
    step(by_step), step(by_epoch), step(unsaid)
    assert "every" not in by_step.state_dict()["schedule"]  # as in the last version
    with pytest.raises(CheckpointError, match=r"counted steps, and this one counts epochs\. Say"):
        by_epoch.load_state_dict(by_step.state_dict())
    with pytest.raises(CheckpointError, match="counted epochs, and this one counts steps"):
        by_step.load_state_dict(by_epoch.state_dict())
    by_function = engine(schedules.every("epoch", lambda epoch: 0.5**epoch))
    step(by_function)
    state = by_function.state_dict()
    state["schedule"] = {"every": "epoch", "epochs_done": "many"}
    with pytest.raises(CheckpointError, match="epochs_done='many', not a number of epochs"):
        by_function.load_state_dict(state)


def test_a_bare_scheduler_says_what_it_counts(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = parts()
    scheduler = StepLR(optimizer, 2)
    for _ in range(2):
        paceline.Engine(model, loss=nn.MSELoss(), optimizer=optimizer, schedule=scheduler)
    (line,) = [record.message for record in caplog.records if record.name == "paceline"]
    assert line == (
        "schedule=StepLR(…) counts optimizer steps, not epochs. Say which is meant: "
        "schedule=paceline.schedules.every('step', steplr) or every('epoch', …). The next version "
        "will ask for it."
    )


def test_wrong_intervals_are_answered() -> None:
    for message, schedule in {
        r"every\('batch', …\) must be 'step', 'epoch' or": lambda: schedules.every("batch", StepLR),
        "Say it once": lambda: schedules.every("step", schedules.every("epoch", StepLR)),
        "is for ReduceLROnPlateau alone": lambda: schedules.every("epoch", StepLR, metric="loss"),
        r"once an evaluation: pass": lambda: schedules.every("epoch", ReduceLROnPlateau),
        "is a larger 'f1' better": lambda: schedules.every(
            "evaluation", ReduceLROnPlateau, metric="f1"
        ),
        "arguments are for a scheduler class": lambda: schedules.every(
            "epoch", lambda epoch: 1.0, gamma=0.5
        ),
    }.items():
        with pytest.raises(TrainingError, match=message):
            engine(
                schedule()
                if "ReduceLROnPlateau alone" not in message
                else schedules.every("epoch", StepLR, step_size=1, metric="loss")
            )
    model, optimizer = parts()
    trainer = paceline.Trainer(
        model,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        global_batch=4,
        schedule=schedules.every("evaluation", plateau(optimizer), metric="accuracy"),
        progress=False,
    )
    with pytest.raises(TrainingError, match="ReduceLROnPlateau needs validation data"):
        trainer.fit(data(4, 1), epochs=1)
    with pytest.raises(TrainingError, match="ReduceLROnPlateau watches the metric 'accuracy'"):
        trainer.fit(data(4, 1), data(4, 1), epochs=1)


def of_config(schedule: dict[str, Any], epochs: int = 4) -> tuple[Any, torch.optim.Optimizer]:
    config = load(
        {
            "model": {"target": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 1}},
            "schedule": schedule,
            "train": {"epochs": epochs},
            "optimizer": {"name": "sgd", "lr": 1.0},
            "batch": {"global_batch": 4},
        }
    )
    model, _ = parts()
    optimizer = make_optimizer(config, model)
    return make_schedule(config, data(12, 1), optimizer), optimizer


def test_configs_say_what_is_counted() -> None:
    def rates(schedule: dict[str, Any]) -> list[float]:
        made, optimizer = of_config(schedule)
        model = nn.Linear(3, 1, dtype=torch.float64)
        model.weight, model.bias = optimizer.param_groups[0]["params"]
        found = []
        loop = paceline.Engine(model, loss=nn.MSELoss(), optimizer=optimizer, schedule=made)
        for _ in range(4):
            found += [step(loop) for _ in range(PER_EPOCH)][:1]
            loop.epoch_done()
        return found

    halves = {"name": "StepLR", "args": {"step_size": 1, "gamma": 0.5}}
    assert rates({**halves, "every": "epoch"}) == [1, 0.5, 0.25, 0.125]
    assert rates({**halves, "every": "step"}) == [1, 2**-3, 2**-6, 2**-9]
    assert rates({**halves, "every": "epoch", "warmup_epochs": 2}) == [0.5, 1, 1, 0.5]
    cosine = rates({"name": "CosineAnnealingLR", "every": "epoch"})
    _, optimizer = parts()
    scheduler = CosineAnnealingLR(optimizer, 4)
    wanted = []
    for _ in range(4):
        wanted.append(scheduler.get_last_lr()[0] * 10)
        optimizer.step()
        scheduler.step()
    assert cosine == pytest.approx(wanted)
    # Five epochs of warm-up are five epochs.
    made, _ = of_config({"name": "constant", "warmup_epochs": 2})
    assert [made(step) for step in (0, 5, 6)] == [1 / 6, 1, 1]
    watching, _ = of_config({"name": "ReduceLROnPlateau", "metric": "loss"})
    assert (watching.interval, watching.metric) == ("evaluation", "loss")
    unsaid = load({"schedule": {"name": "StepLR", "args": {"step_size": 1}}})
    assert "counts optimizer steps, not epochs" in str(unsaid_interval(unsaid))
    with pytest.raises(ConfigError, match="does not say how long an epoch is"):
        make_schedule(load({"schedule": {"warmup_epochs": 1}}), iter([]))


def test_schedules_one_after_the_other_as_sequential_lr_has_them() -> None:
    joined = schedules.then(schedules.constant(warmup_steps=3), lambda s: 0.5**s, at=3)
    _, optimizer = parts()
    optimizer.param_groups[0]["lr"] = 1.0
    rise = LinearLR(optimizer, 1 / 3, total_iters=2)
    fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    wanted = []
    scheduler = SequentialLR(optimizer, [rise, fall], milestones=[3])
    for _ in range(7):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert [joined(step) for step in range(7)] == pytest.approx(wanted)
    by_epochs = schedules.then(
        schedules.constant(),
        schedules.linear(6),
        lambda s: 0.1,
        at_epochs=[1, 3],
        steps_per_epoch=3,
    )
    assert [by_epochs(step) for step in (2, 3, 6, 9)] == [1, 1, 0.5, 0.1]
    for message, arguments in {
        "2 schedules need 1 starts": {},
        "both say when": {"at": 3, "at_epochs": 1},
        "must rise": {"at": 0},
        "needs steps_per_epoch": {"at_epochs": 2},
    }.items():
        with pytest.raises(ConfigError, match=message):
            schedules.then(schedules.constant(), schedules.constant(), **arguments)
