"""An argument that does not exist is answered with the one that was probably meant."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.config.keys import FIELDS
from paceline.errors import DataError, TrainingError
from paceline.options.other_names import ELSEWHERE
from paceline.options.reference import OWNERS


def trainer(**options: Any) -> paceline.Trainer:
    return paceline.Trainer(nn.Linear(1, 1), optimizer=torch.optim.SGD, **options)


def engine(**options: Any) -> paceline.Engine:
    return paceline.Engine(nn.Linear(1, 1), optimizer=torch.optim.SGD, **options)


def fit(**options: Any) -> Any:
    return trainer(global_batch=2).fit([1, 2], **options)


def loader(**options: Any) -> Any:
    return paceline.loader([1, 2], **options)


def prepare(**options: Any) -> Any:
    model = nn.Linear(1, 1)
    return paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)


CASES: list[tuple[Callable[..., Any], str, str]] = [
    (trainer, "gradient_accumulation_steps", "It is called accumulate here."),
    (trainer, "globl_batch", "Did you mean global_batch?"),
    (trainer, "epochs", "Pass it to fit(epochs=…)."),
    (trainer, "max_epochs", "Pass it to fit(epochs=…)."),
    (trainer, "num_workers", "Pass data=paceline.DataOptions(workers=…)."),
    (trainer, "workers", "Pass data=paceline.DataOptions(workers=…)."),
    (trainer, "default_root_dir", "It is called run_dir here."),
    (trainer, "save_top_k", "Pass checkpoint=paceline.Checkpointing(keep_best=…)."),
    (trainer, "save_steps", "Pass checkpoint=paceline.Checkpointing(every=…)."),
    (trainer, "eval_steps", "Pass evaluation=paceline.Evaluation(every=…)."),
    (trainer, "learning_rate", "It is the optimizer's: pass it where you make that."),
    (engine, "mixed_precision", "It is called precision here."),
    (engine, "gradient_checkpointing", "It is called checkpoint_activations here."),
    (engine, "batch_size", "Pass it to loader(global_batch=…)."),
    (engine, "offload", "Pass sharding=paceline.Sharding(offload=…)."),
    (fit, "num_train_epochs", "It is called epochs here."),
    (fit, "max_steps", "It is called steps here."),
    (fit, "batch_size", "Pass it to Trainer(global_batch=…)."),
    (fit, "layout", "Pass it to Trainer(layout=…)."),
    (fit, "resumed", "Did you mean resume?"),
    (loader, "batch_size", "It is called global_batch here."),
    (loader, "num_workers", "It is called workers here."),
    (loader, "shufle", "Did you mean shuffle?"),
    (prepare, "gradient_accumulation_steps", "It is called accumulate here."),
    (paceline.Checkpointing, "save_total_limit", "It is called keep here."),
    (paceline.Checkpointing, "monitor", "It is called best here."),
    (paceline.Checkpointing, "evry", "Did you mean every?"),
    (paceline.Evaluation, "eval_steps", "It is called every here."),
    (paceline.Compression, "warmup", "Did you mean warmup_steps?"),
    (paceline.DataOptions, "num_workers", "It is called workers here."),
]


@pytest.mark.parametrize(("call", "name", "hint"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_an_unknown_argument_is_answered_with_the_one_that_was_meant(
    call: Callable[..., Any], name: str, hint: str
) -> None:
    error = DataError if call is loader else TrainingError
    with pytest.raises(error) as caught:
        call(**{name: 1})
    taker = call.__name__ if call not in (trainer, engine) else call.__name__.capitalize()
    assert str(caught.value).startswith(f"{taker} got an unknown argument {name}. {hint} It takes ")


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_every_class_of_options_refuses_unknown_names_and_keeps_its_signature(owner: Any) -> None:
    with pytest.raises(TrainingError, match=f"{owner.__name__} got an unknown argument zzzz. It"):
        owner(zzzz=1)
    fields = [field.name for field in dataclasses.fields(owner)]
    assert [*inspect.signature(owner).parameters] == fields


def test_what_other_frameworks_call_a_key_names_one_that_there_is() -> None:
    free = ("optimizer.args.betas", "optimizer.args.eps", "optimizer.args.momentum")
    assert all(key in free or tuple(key.split(".")) in FIELDS for key in ELSEWHERE.values())
