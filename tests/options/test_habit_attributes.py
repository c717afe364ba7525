"""Attributes that people look for from habit are answered with what to use, on every object."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.options.habits import SENTENCES
from paceline.options.habits.attributes import attributes
from paceline.trainer.history import History


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(model, optimizer=optimizer, loss=nn.MSELoss(), global_batch=2)
    engine = paceline.Engine(nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss())
    yield {
        "Trainer": trainer,
        "Engine": engine,
        "History": History(),
        "World": engine.world,
        "Accelerator": paceline.Accelerator(),
        "paceline": paceline,
    }
    engine.world.close()


def test_every_row_has_its_answer(objects: dict[str, Any]) -> None:
    for kind, rows in attributes().items():
        for name, instead in rows.items():
            assert not hasattr(objects[kind], name), f"{kind}.{name} is there now: drop its row"
            with pytest.raises(AttributeError) as caught:
                getattr(objects[kind], name)
            assert str(caught.value) == f"{kind} has no attribute {name!r}: use {instead}."


def test_what_to_use_instead_is_there(objects: dict[str, Any]) -> None:
    """Every ``trainer.x``, ``paceline.X`` and so on that an answer names."""
    named = {**{kind.lower(): value for kind, value in objects.items()}, "paceline": paceline}
    for rows in attributes().values():
        for instead in rows.values():
            for kind, path in re.findall(
                r"(?<![.\w])(trainer|engine|history|world|accelerator|paceline)((?:\.\w+)+)",
                instead,
            ):
                found = named[kind]
                for part in path.split(".")[1:]:
                    if kind == "trainer" and part == "engine":  # there is none before fit
                        found = objects["Engine"]
                    else:
                        found = getattr(found, part)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("Trainer", "evalute", "Trainer has no attribute 'evalute': did you mean 'evaluate'?"),
        (
            "Trainer",
            "is_world_proces_zero",
            "nor 'is_world_process_zero': use trainer.engine.world",
        ),
        ("History", "zzz", "History has no attribute 'zzz': there are add, best, epochs, evals, "),
        ("World", "szie", "did you mean 'size'?"),
        ("paceline", "Trainr", "did you mean 'Trainer'?"),
    ],
)
def test_any_other_name_gets_the_closest_or_the_list(
    objects: dict[str, Any], kind: str, name: str, said: str
) -> None:
    with pytest.raises(AttributeError, match=re.escape(said)):
        getattr(objects[kind], name)


def test_objects_are_copied_and_pickled_as_before(objects: dict[str, Any]) -> None:
    history = pickle.loads(pickle.dumps(History(reason="done")))
    assert history == History(reason="done")
    assert copy.copy(objects["Trainer"]).step == 0
    assert getattr(objects["World"], "_no_such_thing", None) is None


def test_every_name_of_accelerates_accelerator_is_there_or_answered(
    objects: dict[str, Any],
) -> None:
    theirs = pytest.importorskip("accelerate").Accelerator
    public = {name for name in dir(theirs) if not name.startswith("_")}
    there = {name for name in public if hasattr(objects["Accelerator"], name)}
    assert public - there - attributes()["Accelerator"].keys() == set()
    arguments = set(inspect.signature(theirs).parameters)
    assert arguments - SENTENCES["Accelerator"].keys() == set()


def test_arguments_of_accelerates_accelerator_are_answered_for_ours() -> None:
    taken = inspect.signature(paceline.Accelerator).parameters
    for name, sentence in SENTENCES["Accelerator"].items():
        assert name not in taken
        with pytest.raises(paceline.errors.TrainingError) as caught:
            paceline.Accelerator(**{name: None})  # type: ignore[arg-type]
        assert str(caught.value) == f"Accelerator got an unknown argument {name}. {sentence}"
        for used in re.findall(r"paceline\.Accelerator\((\w+)=", sentence):
            assert used in taken
