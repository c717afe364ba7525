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
from paceline.errors import DataError, TrainingError
from paceline.options.reference import OWNERS


def trainer(**options: Any) -> paceline.Trainer:
    return paceline.Trainer(nn.Linear(1, 1), optimizer=torch.optim.SGD, **options)


def engine(**options: Any) -> paceline.Engine:
    return paceline.Engine(nn.Linear(1, 1), optimizer=torch.optim.SGD, **options)


def fit(**options: Any) -> Any:
    return trainer(global_batch=2).fit([1, 2], **options)


def loader(**options: Any) -> Any:
    return paceline.loader([1, 2], **options)


def evaluate(**options: Any) -> Any:
    return trainer().evaluate([1, 2], **options)


def predict(**options: Any) -> Any:
    return trainer().predict([1, 2], **options)


CASES: list[tuple[Callable[..., Any], str, str]] = [
    (trainer, "globl_batch", "Did you mean global_batch?"),
    (trainer, "workers", "Pass data=paceline.DataOptions(workers=…)."),
    (trainer, "keep_every", "Pass checkpoint=paceline.Checkpointing(keep_every=…)."),
    (trainer, "nproc", "Pass it to fit(nproc=…)."),
    (engine, "offload", "Pass sharding=paceline.Sharding(offload=…)."),
    (engine, "global_batch", "Pass it to loader(global_batch=…)."),
    (fit, "layout", "Pass it to Trainer(layout=…)."),
    (fit, "resumed", "Did you mean resume?"),
    (loader, "shufle", "Did you mean shuffle?"),
    (paceline.Checkpointing, "save_total_limit", "It is called keep here: Checkpointing(keep=3)."),
    (paceline.Checkpointing, "save_steps", "It is called every here: Checkpointing(every=100)."),
    (
        paceline.Checkpointing,
        "checkpoint_at_end",
        "It is called save_at_end here: Checkpointing(save_at_end=False).",
    ),
    (paceline.Checkpointing, "monitor", "It is called best here: Checkpointing(best='loss')."),
    (paceline.Checkpointing, "metric", "It is called best here."),
    (paceline.Checkpointing, "evry", "Did you mean every?"),
    (paceline.Evaluation, "eval_steps", "It is called every here: Evaluation(every=100)."),
    (paceline.Compression, "warmup", "Did you mean warmup_steps?"),
    (paceline.DataOptions, "num_workers", "It is called workers here: DataOptions(workers=4)."),
    (paceline.EarlyStopping, "monitor", "It is called metric here."),
    (paceline.EarlyStopping, "early_stopping_threshold", "It is called min_delta here."),
    (paceline.EarlyStopping, "patiense", "Did you mean patience?"),
    (paceline.EarlyStopping, "zzzz", "It takes metric, min_delta, mode, patience."),
    (evaluate, "ckpt_path", "It is called which here."),
    (evaluate, "steps", "It is called batches here."),
    (evaluate, "layout", "Pass it to Trainer(layout=…)."),
    (
        evaluate,
        "batch_size",
        "The batch of a step over all ranks is global_batch, and that of one rank per_device_batch: "
        "paceline.Trainer(model, ..., global_batch=32).",
    ),
    (predict, "output_path", "It is called out here."),
    (predict, "overwrit", "Did you mean overwrite?"),
]


@pytest.mark.parametrize(("call", "name", "hint"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_an_unknown_argument_is_answered_with_the_one_that_was_meant(
    call: Callable[..., Any], name: str, hint: str
) -> None:
    error = DataError if call is loader else TrainingError
    with pytest.raises(error) as caught:
        call(**{name: 1})
    taker = call.__name__ if call not in (trainer, engine) else call.__name__.capitalize()
    assert str(caught.value) == f"{taker} got an unknown argument {name}. {hint}"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("16-mixed", "fp16"),
        ("bf16-mixed", "bf16"),
        ("32-true", "fp32"),
        (16, "fp16"),
        (torch.bfloat16, "bf16"),
        ("64", "fp64"),
        ("no", "fp32"),
    ],
)
def test_a_precision_of_another_library_is_answered_with_ours(typed: Any, meant: str) -> None:
    for call in (trainer, engine, paceline.Accelerator):
        with pytest.raises(TrainingError) as caught:
            call(precision=typed)
        assert str(caught.value) == (
            f"precision={typed!r} must be one of fp32, bf16, fp16, fp64. Did you mean {meant!r}?"
        )


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_every_class_of_options_refuses_unknown_names_and_keeps_its_signature(owner: Any) -> None:
    with pytest.raises(TrainingError, match=f"{owner.__name__} got an unknown argument zzzz. It"):
        owner(zzzz=1)
    fields = [field.name for field in dataclasses.fields(owner)]
    assert [*inspect.signature(owner).parameters] == fields
