"""What an engine shows to users, and the one door to the rest."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import paceline
from paceline.engine.internals import internals_of

SOURCE = Path(paceline.__file__).parent
PUBLIC = {
    *(
        "options",
        "world",
        "layout",
        "place",
        "coordinate",
        "device",
        "model",
        "optimizer",
        "parameter_count",
    ),
    *("step", "steps_done", "spread", "settle", "in_round", "meet"),
    *("epoch_done", "evaluated"),
    *(
        "evaluating",
        "evaluate",
        "predict",
        "log",
        "take_notes",
        "traffic",
        "measuring_memory",
        "memory",
    ),
    *("state_dict", "load_state_dict"),
    "rank_state",  # what paceline.Checkpoints asks of anything that it saves
    *("whole_parameters", "whole_gradients", "whole_buffers"),
}


def test_what_an_engine_shows() -> None:
    model = torch.nn.Linear(2, 1)
    engine = paceline.Engine(model, loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD)
    assert {name for name in dir(engine) if not name.startswith("_")} == PUBLIC
    assert internals_of(engine).replica.model is engine.model


def test_nobody_reaches_into_an_engine() -> None:
    reach = re.compile(r"engine\._[a-z]")
    found = [path for path in SOURCE.rglob("*.py") if reach.search(path.read_text())]
    assert found == []
