"""A Keras model and its optimizer, as our checkpoints save and restore them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.rank_state import Part, RankState, whole_part
from paceline.checkpoint.saveable import Load, Saved
from paceline.errors import CheckpointError, TrainingError
from paceline.layout import Layout
from paceline.world import World

OBJECT = "keras"
_SIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}


class KerasState:
    """What of a Keras model is saved: its variables, its optimizer's, and the step.

    Names are positions: Keras numbers the names of layers anew in every process. Every rank reads
    all values, since some are means over the replicas; rank 0 writes them.
    """

    in_round = False
    is_pending = False

    def __init__(self, model: Any, strategy: Any, world: World, layout: Layout) -> None:
        self.model, self.world, self.layout = model, world, layout
        self._strategy = strategy
        self.steps_done = 0
        self.global_batch: int | None = None
        """Of the run that is saved, or was taken over."""

    @property
    def rank_state(self) -> KerasState:
        """This: every rank has the whole state."""
        return self

    def settle(self) -> None:
        """Keras' steps are over when their callbacks are called."""

    def collect(self) -> RankState:
        """All values, as copies. Every rank calls it."""
        state = RankState()
        with self._strategy.scope():
            values = {name: to_tensor(name, variable) for name, variable in self._variables()}
        if self.world.is_main:
            state.tensors = {name: whole_part(value) for name, value in values.items()}
            state.objects[OBJECT] = {"step": self.steps_done, "global_batch": self.global_batch}
        return state

    def take(self, saved: Saved, load: Load) -> None:
        """Take over what a checkpoint holds, of any number of workers. Every rank calls it."""
        self._take(saved, load, dict(self._variables()))
        found = saved.read_object(OBJECT)
        self.steps_done, self.global_batch = int(found["step"]), found["global_batch"]

    def take_weights(self, saved: Saved, load: Load) -> int:
        """Take over the model's weights alone; returns the step they are of."""
        variables = {n: v for n, v in self._variables() if n.startswith("model/")}
        self._take(saved, load, variables, strict=False)
        return int(saved.read_object(OBJECT)["step"])

    def _take(
        self, saved: Saved, load: Load, variables: dict[str, Any], *, strict: bool = True
    ) -> None:
        entries = saved.manifest.tensors
        if OBJECT not in saved.manifest.objects:
            raise CheckpointError(
                "the checkpoint is not one of a TensorFlowTrainer: it holds no Keras model. Resume "
                "it with the trainer that wrote it, or choose another run_dir."
            )
        missing = sorted(variables.keys() - entries.keys())
        known = {name for name in entries if strict or name.startswith("model/")}
        unknown = sorted(known - variables.keys())
        wrong = [
            f"{name} is {entries[name].shape} there and {tuple(variable.shape)} here"
            for name, variable in variables.items()
            if name in entries and tuple(entries[name].shape) != tuple(variable.shape)
        ]
        if missing or unknown or wrong:
            told = wrong or [f"{n} is only here" for n in missing]
            told = told or [f"{n} is only there" for n in unknown]
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer: {'; '.join(told[:3])}. Build "
                "the model that was trained, or choose another run_dir."
            )
        values = {
            name: torch.empty(entries[name].shape, dtype=getattr(torch, entries[name].dtype))
            for name in variables
        }
        parts: dict[str, Part] = {name: whole_part(value) for name, value in values.items()}
        load(parts)
        with self._strategy.scope():
            for name, variable in variables.items():
                variable.assign(to_array(values[name], dtype_of(variable)))

    def _variables(self) -> Iterator[tuple[str, Any]]:
        for at, variable in enumerate(self.model.variables):
            yield f"model/{at:04d}.{_short(variable)}", variable
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            found = optimizer.variables
            found = found if isinstance(found, list | tuple) else found()
            for at, variable in enumerate(found):
                yield f"optimizer/{at:04d}.{_short(variable)}", variable


def build_optimizer(model: Any, strategy: Any) -> None:
    """Make the optimizer's variables now, so that there is something to restore into."""
    optimizer = model.optimizer
    build = getattr(optimizer, "build", None)
    if build is None:
        raise TrainingError(
            f"{type(optimizer).__name__} is one of Keras' legacy optimizers, whose state cannot be "
            "saved. Use the optimizer of the same name in keras.optimizers."
        )
    with strategy.scope():
        if not getattr(optimizer, "built", False):
            build(model.trainable_variables)


def dtype_of(variable: Any) -> str:
    """The name of a variable's dtype, in either Keras."""
    return str(getattr(variable.dtype, "name", variable.dtype))


def to_tensor(name: str, variable: Any) -> Tensor:
    """The value of a variable as a torch tensor."""
    value = np.array(variable.numpy())
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    if value.dtype.name in _SIGNED:
        value = value.view(_SIGNED[value.dtype.name])
    try:
        return torch.from_numpy(value)
    except TypeError:
        raise CheckpointError(
            f"{name} holds {value.dtype.name}, which a checkpoint cannot hold."
        ) from None


def to_array(tensor: Tensor, dtype: str) -> Any:
    """The array that ``to_tensor`` was given."""
    if dtype == "bfloat16":
        from ml_dtypes import bfloat16

        return tensor.view(torch.int16).numpy().view(bfloat16)
    value = tensor.numpy()
    return value.view(dtype) if dtype in _SIGNED else value


def _short(variable: Any) -> str:
    name = getattr(variable, "path", None) or variable.name
    return str(name).partition(":")[0].rpartition("/")[2]
