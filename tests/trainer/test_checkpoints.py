"""Checkpoints of a loop of one's own: any layout to any other, whatever is saved with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from engine.test_layouts import batches, make_engine, own_share
from paceline import Layout

LAYOUTS = [
    "dp=1",
    "dp=2",
    "dp=2,zero=1",
    "tp=2",
    "pp=2",
    "dp=3",
    "dp=4,zero=2",
    "dp=4,zero=3,replicas=2",
    "dp=2,zero=3,tp=2",
    "tp=2,pp=2",
]


def size_of(layout: str) -> int:
    place = Layout.parse(layout)
    return place.dp * place.tp * place.pp


def trained(layout: str, steps: int) -> paceline.Engine:
    engine = make_engine(layout)
    for batch in batches(6)[:steps]:
        engine.step(own_share(batch, engine.layout))
    return engine


def save_on(layout: str, folder: str) -> Any:
    engine = trained(layout, 2)
    with paceline.Checkpoints(folder, engine) as checkpoints:
        checkpoints.save(wait=True)
        [(outcome, _, _)] = checkpoints.finished()
    assert outcome.error is None
    return engine.state_dict()


def load_on(layout: str, folders: list[str]) -> list[Any]:
    engine = trained(layout, 1)
    found = []
    for folder in folders:
        with paceline.Checkpoints(folder, engine) as checkpoints:
            restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == engine.steps_done == 2
        found.append(copy.deepcopy(engine.state_dict()))  # where it is plain, it is live
    return found


def assert_equal_to_the_bit(found: Any, wanted: Any, path: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key, value in wanted.items():
            assert_equal_to_the_bit(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list | tuple):
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal_to_the_bit(*pair, f"{path}.{index}")
    else:
        assert found == wanted, path


@pytest.mark.timeout(300)
def test_ten_layouts_load_what_each_saved(ranks: Any, tmp_path: Path) -> None:
    folders = [str(tmp_path / layout) for layout in LAYOUTS]
    saved = [
        ranks(save_on, layout, folder, world_size=size_of(layout))[0]
        for layout, folder in zip(LAYOUTS, folders, strict=True)
    ]
    for layout in LAYOUTS:
        for loaded in ranks(load_on, layout, folders, world_size=size_of(layout)):
            for source, found, wanted in zip(LAYOUTS, loaded, saved, strict=True):
                assert_equal_to_the_bit(found, wanted, f"{source} -> {layout}")
