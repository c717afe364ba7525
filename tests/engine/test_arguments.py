"""Wrong kinds of arguments: one sentence that names the value and what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import DataError, LaunchError, LayoutError, LossError, TrainingError
from paceline.launch.job import check_nproc
from paceline.trainer import DataOptions

SAMPLES = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def engine(model: Any = ..., **arguments: Any) -> paceline.Engine:
    arguments = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, **arguments}
    return paceline.Engine(Net() if model is ... else model, **arguments)


def trainer(model: Any = ..., **arguments: Any) -> paceline.Trainer:
    arguments = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
        "global_batch": 4,
        "progress": False,
        **arguments,
    }
    return paceline.Trainer(Net() if model is ... else model, **arguments)


NO_MODULE = "must be a torch.nn.Module. Build the model first and pass it."
NO_OPTIMIZER = (
    "is not an optimizer. Pass a torch optimizer over the model's parameters, or a function that "
    "makes one from them, such as torch.optim.AdamW."
)
SHARED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model: class": (
        {"model": Net},
        TrainingError,
        "model=Net is a class. Pass a model made from it: Net(…).",
    ),
    "model: None": ({"model": None}, TrainingError, f"model=None {NO_MODULE}"),
    "model: text": ({"model": "gpt2"}, TrainingError, f"model='gpt2' {NO_MODULE}"),
    "model: container": (
        {"model": nn.ModuleList([nn.Linear(4, 2)])},
        TrainingError,
        "the model is a ModuleList, which has no forward(). Wrap it in a module that says how its "
        "parts are called, such as torch.nn.Sequential.",
    ),
    "loss: text": (
        {"loss": "mse"},
        LossError,
        "loss='mse' must be a function called as loss(output, target), such as "
        "torch.nn.CrossEntropyLoss().",
    ),
    "loss: class": (
        {"loss": nn.CrossEntropyLoss},
        LossError,
        "loss=CrossEntropyLoss is a class. Pass an object of it: CrossEntropyLoss().",
    ),
    "optimizer: number": ({"optimizer": 0.1}, TrainingError, f"optimizer=0.1 {NO_OPTIMIZER}"),
    "optimizer: schedule": (
        {"optimizer": torch.optim.lr_scheduler.StepLR},
        TrainingError,
        f"optimizer=StepLR {NO_OPTIMIZER}",
    ),
    "clip_norm: text": (
        {"clip_norm": "x"},
        TrainingError,
        "clip_norm='x' must be a number greater than 0, or None for no clipping.",
    ),
    "clip_value: nan": (
        {"clip_value": float("nan")},
        TrainingError,
        "clip_value=nan must be a number greater than 0, or None for no clipping.",
    ),
    "microbatch: True": (
        {"microbatch": True},
        TrainingError,
        "microbatch=True must be a whole number of samples, 1 or more.",
    ),
    "compile: text": ({"compile": "no"}, TrainingError, "compile='no' must be True or False."),
    "sync_batchnorm: text": (
        {"sync_batchnorm": "no"},
        TrainingError,
        "sync_batchnorm='no' must be True or False.",
    ),
    "count: number": (
        {"count": 5},
        TrainingError,
        "count=5 must be a function, called as count(batch).",
    ),
    "sharding: text": (
        {"sharding": "zero3"},
        TrainingError,
        "sharding='zero3' must be made with paceline.Sharding(…).",
    ),
    "pipeline: text": (
        {"pipeline": "1f1b"},
        TrainingError,
        "pipeline='1f1b' must be made with paceline.Pipelining(…).",
    ),
    "device_map: number": (
        {"device_map": 5},
        TrainingError,
        "device_map=5 must be 'auto' or a dict from the names of modules to devices.",
    ),
    "max_memory alone": (
        {"max_memory": {"cpu": "1GiB"}},
        TrainingError,
        "max_memory= bounds the devices of a device map, and there is none. Pass "
        "device_map='auto' with it, or leave it out.",
    ),
}


@pytest.mark.parametrize("make", [engine, trainer])
@pytest.mark.parametrize("case", SHARED)
def test_engine_and_trainer_answer_alike(make: Callable[..., Any], case: str) -> None:
    arguments, kind, words = SHARED[case]
    with pytest.raises(kind) as caught:
        make(**arguments)
    assert str(caught.value) == words


ENGINE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "layout: number": (
        lambda: engine(layout=5),
        LayoutError,
        "layout 5 must be text such as 'dp=4,tp=2', or 'auto' for the whole world.",
    ),
    "layout: empty": (
        lambda: engine(layout=" "),
        LayoutError,
        "layout ' ' must be text such as 'dp=4,tp=2', or 'auto' for the whole world.",
    ),
    "world: number": (
        lambda: engine(world=5),
        TrainingError,
        "world=5 must be a paceline.World. Leave it out for the world that this process was "
        "launched into.",
    ),
    "schedule: class": (
        lambda: engine(schedule=torch.optim.lr_scheduler.LambdaLR),
        TrainingError,
        "schedule=<class 'torch.optim.lr_scheduler.LambdaLR'> must be a function from the step to "
        "a factor on the learning rate, or one of torch's schedulers.",
    ),
    "schedule: gives text": (
        lambda: engine(schedule=lambda step: "x").step(SAMPLES[:]),
        TrainingError,
        "the schedule gave 'x' at step 0: it must return a number, the factor on the learning "
        "rate.",
    ),
    "prepare: class": (
        lambda: paceline.prepare(Net, torch.optim.SGD(Net().parameters())),  # type: ignore[arg-type]
        TrainingError,
        "model=Net is a class. Pass a model made from it: Net(…).",
    ),
    "loader: collate_fn": (
        lambda: paceline.loader(SAMPLES, global_batch=4, collate_fn=5),  # type: ignore[arg-type]
        DataError,
        "collate_fn=5 must be a function that makes a batch of a list of samples.",
    ),
    "verify: loss": (
        lambda: paceline.verify(
            Net(),
            optimizer=torch.optim.SGD,
            loss="mse",
            data=SAMPLES,
            layouts=["dp=2"],
            global_batch=4,
        ),  # type: ignore[arg-type]
        LossError,
        "loss='mse' must be a function called as loss(output, target), such as "
        "torch.nn.CrossEntropyLoss().",
    ),
}


@pytest.mark.parametrize("case", ENGINE)
def test_other_doors(case: str) -> None:
    call, kind, words = ENGINE[case]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == words


def test_no_loss_with_a_plain_model() -> None:
    with pytest.raises(LossError) as caught:
        engine(loss=None).step(SAMPLES[:])
    assert "called with 2 items of the batch" in str(caught.value)
    assert "Pass loss=, or forward=" in str(caught.value)
    with pytest.raises(LossError, match=r"output is taken for the loss, and it has shape \(8, 2\)"):
        engine(loss=None).step(SAMPLES[:][0])


def test_a_models_own_type_error_stays_its_own() -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + None  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        engine(Broken()).step(SAMPLES[:])


TRAINER: dict[str, tuple[Callable[[], Any], str]] = {
    "workers: negative": (
        lambda: DataOptions(workers=-1),
        "DataOptions: workers=-1 must be a whole number, 0 or more.",
    ),
    "workers: text": (
        lambda: DataOptions(workers="a"),  # type: ignore[arg-type]
        "DataOptions: workers='a' must be a whole number, 0 or more.",
    ),
    "drop_last: text": (
        lambda: DataOptions(drop_last="x"),  # type: ignore[arg-type]
        "DataOptions: drop_last='x' must be True or False.",
    ),
    "save_at_end: text": (
        lambda: paceline.Checkpointing(save_at_end="no"),  # type: ignore[arg-type]
        "Checkpointing: save_at_end='no' must be True or False.",
    ),
    "best: direction unknown": (
        lambda: paceline.Checkpointing(best="accuracy"),
        "Checkpointing(best=): is a larger 'accuracy' better, or a smaller one? Pass mode='max' or "
        "mode='min'.",
    ),
    "early stopping: direction unknown": (
        lambda: paceline.EarlyStopping("accuracy"),
        "EarlyStopping: is a larger 'accuracy' better, or a smaller one? Pass mode='max' or "
        "mode='min'.",
    ),
    "where: number": (
        lambda: paceline.Checkpointing(where=5),  # type: ignore[arg-type]
        "Checkpointing: where=5 must be a folder or a URL.",
    ),
    "run_dir: empty": (
        lambda: trainer(run_dir=""),
        "run_dir='' must be a folder's path, or None to keep nothing on disk.",
    ),
    "progress: text": (lambda: trainer(progress="no"), "progress='no' must be True or False."),
    "trackers: text": (
        lambda: trainer(trackers=["tensorboard"]),
        "trackers=['tensorboard'] must be a list of trackers, such as "
        "[paceline.track.TensorBoard(folder)].",
    ),
    "objects: number": (
        lambda: trainer(objects={"a": 5}),
        "objects: 'a' is a int without state_dict(), so it cannot be saved.",
    ),
    "metrics: name": (
        lambda: trainer(metrics={3: nn.MSELoss()}),
        "metrics: the name 3 must be text.",
    ),
    "max_restarts": (
        lambda: trainer().fit(SAMPLES, epochs=1, nproc=2, max_restarts=-1),
        "fit: max_restarts=-1 must be a whole number, 0 or more.",
    ),
}


@pytest.mark.parametrize("case", TRAINER)
def test_trainer(case: str) -> None:
    call, words = TRAINER[case]
    with pytest.raises(TrainingError) as caught:
        call()
    assert str(caught.value) == words


def test_more_ranks_than_memory_holds_are_not_started() -> None:
    with pytest.raises(LaunchError, match=r"nproc=999999: a rank is a process of at least 100 MiB"):
        trainer().fit(SAMPLES, epochs=1, nproc=999_999)
    check_nproc(10, memory=10 * 100 << 20)
    with pytest.raises(LaunchError, match=r"1\.0 GiB of memory, which holds 10 at most"):
        check_nproc(11, memory=1 << 30)
    for wrong in (0, -1, "a", 1.5, True):
        with pytest.raises(LaunchError, match="must be a whole number, 1 or more"):
            check_nproc(wrong)
