"""The weights in a checkpoint: which tensors they are, of which engine, trained or averaged."""

from __future__ import annotations

from typing import Any

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.engine_names import engine_prefix
from paceline.errors import CheckpointError
from paceline.options.ema import Weights

_MODEL, _AVERAGE, _ENGINE = "model/", "ema/", "engine"


class SavedWeights:
    """What a checkpoint holds of a model; ``engine`` names it where several were saved together.

    With ``weights="ema"`` the averaged weights; what has no average (frozen parameters, buffers)
    is as the model has it.
    """

    def __init__(
        self, checkpoint: Checkpoint, weights: Weights = "model", engine: str | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._prefix = engine_prefix(checkpoint, engine)
        self.keys = self._below(_MODEL)
        """By the name of each tensor in the model: its key in the checkpoint."""
        if weights == "ema":
            averaged = self._below(_AVERAGE)
            if not averaged:
                raise CheckpointError(
                    f"{checkpoint.path} holds no averaged weights: the run kept none (ema:, or "
                    "Engine(ema=)), or had not begun to. Take weights='model'."
                )
            self.keys |= {name: key for name, key in averaged.items() if name in self.keys}

    def _below(self, kind: str) -> dict[str, str]:
        prefix = self._prefix + kind
        there = self.checkpoint.manifest.tensors
        return {name.removeprefix(prefix): name for name in there if name.startswith(prefix)}

    def _about(self) -> dict[str, Any]:
        """What the engine saved beside tensors; nothing where weights were imported."""
        found = {}
        if self._prefix + _ENGINE in self.checkpoint.manifest.objects:
            found = self.checkpoint.read_object(self._prefix + _ENGINE)
        return found if isinstance(found, dict) else {}

    def aliases(self) -> dict[str, str]:
        """Further names of tied weights, and the name each was saved under."""
        aliases = self._about().get("aliases") or {}
        if lost := sorted(first for first in aliases.values() if first not in self.keys):
            raise CheckpointError(
                f"{self.checkpoint.path} names {lost[0]!r} as that of a tied weight, but does not "
                "hold it."
            )
        return dict(aliases)

    def extra(self, part: str = "") -> dict[str, Any]:
        """What modules save beside tensors (``get_extra_state``), by its name in the state dict."""
        prefix = f"{part}." if part else ""
        extra = self._about().get("extra") or {}
        return {n.removeprefix(prefix): v for n, v in extra.items() if n.startswith(prefix)}
