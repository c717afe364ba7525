"""The adapter of a model that is being trained, in the folder that peft loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.checkpoint.restore import on_all_ranks
from paceline.checkpoint.weights.export_adapter import read_adapters, write_adapters
from paceline.checkpoint.weights.export_files import Weight
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.errors import TrainingError
from paceline.trainer.base import TrainerBase


def save_adapter(
    trained: Engine | TrainerBase,
    folder: str | os.PathLike[str],
    *,
    part: str = "",
    force: bool = False,
) -> Path:
    """Write the adapter that peft put into the model, as ``adapter_config.json`` and safetensors.

        paceline.save_adapter(trainer, "adapter")
        model = peft.PeftModel.from_pretrained(base, "adapter")

    The base weights are not written. Every rank calls it, whatever the layout, and rank 0 writes;
    it needs memory for the adapter alone. Of a checkpoint, ``paceline checkpoint export RUN FOLDER
    --format peft`` writes the same.

    Args:
        trained: an engine, or a trainer that has one: after ``fit``.
        folder: a folder that is not there yet, in one that is.
        part: the name of the submodule that peft wrapped, where several are.
        force: replace a folder that an earlier call wrote.
    """
    engine: Any = trained.engine if isinstance(trained, TrainerBase) else trained
    if not isinstance(engine, Engine):
        raise TrainingError(
            f"save_adapter: a {type(trained).__name__} stands where the engine or the trainer "
            "goes. A model that is in no engine is saved by its own save_pretrained."
        )
    engine.settle()
    internals = internals_of(engine)
    state = internals.state
    adapters = read_adapters(state.adapters(), part, f"this {type(engine.model).__name__}")
    with internals.sync.shared_model():
        tensors = state.tensors([n for adapter in adapters for n in adapter.tensors.values()])
    files = []
    for adapter in adapters:
        named = [(file, name, tensors[name]) for file, name in adapter.tensors.items()]
        own = [Weight(file, name, tuple(one.shape), one.dtype) for file, name, one in named]
        files.append((adapter, own))

    def write() -> Path:
        if engine.world.is_main:
            write_adapters(folder, files, lambda weight: tensors[weight.key], force=force)
        return Path(folder)

    return on_all_ranks(write)
