"""Weights and checkpoints of a loop of the user's own."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.checkpoints import Checkpoints, Restored
from paceline.checkpoint.saveable import Stateful, checked_objects
from paceline.engine.accelerator_parts import AcceleratorParts
from paceline.engine.prepared_state import PreparedState
from paceline.errors import CheckpointError, TrainingError
from paceline.options import Checkpointing
from paceline.parallel.dtensor import whole


class SavingAccelerator(AcceleratorParts):
    """The part of ``paceline.Accelerator`` that saves and loads."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model as you passed it to ``prepare``; sharded, its parameters stay parts."""
        return self._spread_of(model).model

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole weights of a model on the CPU, whatever the layout. Every rank calls it."""
        found = self.unwrap(model).state_dict()
        return {
            name: whole(value).detach().cpu() if isinstance(value, Tensor) else value
            for name, value in found.items()
        }

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far; of several optimizers, those of the one that has done most."""
        return max((control.steps for control in self._controls), default=0)

    def register_for_checkpointing(self, *unnamed: Any, **objects: Stateful) -> None:
        """Have more saved and loaded, by name: anything with a state_dict and a load_state_dict."""
        if unnamed:
            kind = type(unnamed[0]).__name__
            raise TrainingError(
                f"register_for_checkpointing({kind}): give it a name, by which it is found again: "
                f"register_for_checkpointing({kind.lower()}=…). Prepared models, optimizers, "
                "loaders and schedules are saved anyway."
            )
        self._objects |= checked_objects(objects)

    def save_state(self, folder: str | os.PathLike[str], *, keep: int = 2) -> str:
        """Save all that was prepared, and each rank's random state; returns where.

        Models, optimizers, schedules, the scaler, loader positions and what was registered. The
        newest ``keep`` states of a folder stay. Every rank calls it, between steps.
        """
        if not self._loop.accumulation.ends_step:
            raise TrainingError(
                "save_state: in the middle of a step, whose gradients so far would be lost. Call "
                "it where accelerator.sync_gradients is true."
            )
        with self._checkpoints(folder, keep) as checkpoints:
            checkpoints.save(wait=True)
            [(outcome, _, _)] = checkpoints.finished(wait=True)
        if outcome.error is not None:
            raise CheckpointError(outcome.error)
        return str(outcome.path)

    def load_state(
        self, folder: str | os.PathLike[str], *, required: bool = True
    ) -> Restored | None:
        """Go on from the newest good state in ``folder``, on any number of ranks and layout.

        Loaders stand where they stood: nothing has to be skipped. Random state is restored on as
        many ranks as there were. Without a state there it is an error, or ``None`` where none is
        ``required``. Every rank calls it, after ``prepare``.
        """
        with self._checkpoints(folder, 1) as checkpoints:
            restored = checkpoints.restore()
            if restored is None and required:
                raise CheckpointError(
                    f"load_state: there is no state in {os.fspath(folder)}. Look at the path, or "
                    "pass required=False to begin anew."
                )
            state = checkpoints.engine
            assert isinstance(state, PreparedState)
            if restored is not None:
                state.loaded()
            return restored

    def _checkpoints(self, folder: str | os.PathLike[str], keep: int) -> Checkpoints:
        if not self._models:
            raise TrainingError("save_state, load_state: call prepare with a model first.")
        state = PreparedState(
            [made.model for made in self._models],
            self._controls,
            self._schedules,
            self._loop,
            self.layout,
        )
        loaders = {f"loader_{number}": one for number, one in enumerate(self._loaders)}
        options = Checkpointing(keep=keep, asynchronous=False)
        return Checkpoints(folder, state, objects={**loaders, **self._objects}, options=options)
