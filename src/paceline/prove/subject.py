"""What is proved: a model, its loss, optimizer and data, in a form that travels to the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.config import Config
from paceline.data import Loader, loader
from paceline.engine.arguments import OptimizerFactory, check_loss, check_optimizer_kind
from paceline.engine.loss import LossFunction
from paceline.errors import DataError, TrainingError
from paceline.options import DataOptions
from paceline.testing.pickling import pickle_call
from paceline.trainer import run
from paceline.trainer.config_parts import make_collate, make_optimizer


@dataclass(frozen=True)
class Built:
    """One fresh copy of everything a run needs."""

    model: nn.Module
    optimizer: Optimizer | OptimizerFactory
    loss: LossFunction | None
    data: Any
    data_options: DataOptions
    options: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is run again and again; each run builds it anew from ``payload``."""

    payload: bytes
    global_batch: int | None
    seed: int
    steps: int
    precision: str
    runs_in_float64: bool = True
    """Whether all operations of the model have a float64 form."""
    randomness: str | None = None
    """What to use instead of the run's own."""

    def build(self) -> Built:
        """A copy nobody has trained yet, the same on every rank."""
        function, arguments = pickle.loads(self.payload)
        torch.manual_seed(self.seed)
        built: Built = function(*arguments)
        if not isinstance(built.model, nn.Module):
            raise TrainingError(
                f"the model function made a {type(built.model).__name__}, not a torch.nn.Module."
            )
        built.model.train()
        options = {**built.options, "precision": self.precision}
        if self.randomness is not None:
            options["randomness"] = self.randomness
        # Float64, or float32 in its place, is not the run's own: compiling it would prove nothing.
        widest = self.precision == "fp64" or not self.runs_in_float64
        if widest:
            options["compile"] = False
        sharding = options.get("sharding")
        if sharding is not None and widest:
            options["sharding"] = replace(sharding, dtype=None)  # it would compute in that one
        return replace(built, options=options)

    def loader(self, built: Built, rank: int, size: int) -> Loader:
        """The data as rank ``rank`` of ``size`` data-parallel ranks reads it."""
        if isinstance(built.data, DataLoader):
            return loader(
                built.data, global_batch=self.global_batch, seed=self.seed, rank=rank, size=size
            )
        options = built.data_options
        return loader(
            built.data,
            global_batch=self.global_batch,
            seed=self.seed,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            collate_fn=options.collate_fn,
            rank=rank,
            size=size,
        )


def given(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | OptimizerFactory,
    loss: LossFunction | None,
    data: Any,
    data_options: DataOptions,
    options: dict[str, Any],
) -> bytes:
    """The payload of what a caller of ``paceline.verify`` passed."""
    check_loss(loss)
    check_optimizer_kind(optimizer)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TrainingError(
                f"verify(model={model!r}): give a torch.nn.Module or a function that makes one."
            )
        if isinstance(optimizer, Optimizer):
            raise TrainingError(
                "verify(): the model is a function, so the optimizer must be one too, called with "
                "the model's parameters, like lambda parameters: torch.optim.AdamW(parameters)."
            )
    if isinstance(data, Loader):
        raise DataError(
            "verify(data=Loader): a Loader already belongs to one world. Give the dataset or the "
            "torch DataLoader that it was made of."
        )
    try:
        return pickle_call(_assemble, (model, optimizer, loss, data, data_options, options))
    except TypeError as error:
        raise TrainingError(
            f"verify(): what was passed cannot be sent to the ranks: {error.__cause__}. Pass a "
            "function that makes the model, and a dataset that can be pickled."
        ) from error


def _assemble(
    model: Any, optimizer: Any, loss: Any, data: Any, data_options: Any, options: Any
) -> Built:
    made = model if isinstance(model, nn.Module) else model()
    return Built(made, optimizer, loss, data, data_options, options)


def configured(config: Config) -> bytes:
    """The payload of a config: every rank builds what it names."""
    return pickle_call(_from_config, (config,))


def _from_config(config: Config) -> Built:
    model = run.make_model(config)
    data, _ = run.make_datasets(config)
    optimizer = make_optimizer(config, model)
    return Built(
        model=model,
        optimizer=optimizer,
        loss=run.make_loss(config),
        data=data,
        data_options=DataOptions(
            shuffle=None if config.data.shuffle else False,
            drop_last=config.data.drop_last,
            collate_fn=make_collate(config),
        ),
        # Replicas that train alone differ from one process by design: what is proved is a step
        # that they take together.
        options={**run.engine_options(config, data, optimizer), "local_steps": None},
    )
