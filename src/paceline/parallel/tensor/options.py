"""What a user may say about tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TensorParallel:
    """How the ``tp`` ranks of a layout share a model's layers.

    ``plan`` maps name patterns to roles, ``{"*.mlp.up": "column", "*.mlp.out": "row"}``, and then
    says everything: what no pattern names stays whole on every rank. ``"auto"`` takes a Hugging
    Face model's own plan where it has one, and otherwise finds one by following the data.
    ``sequence`` splits the activations between the split layers along the sequence, ``vocabulary``
    the embedding, the output layer and the cross-entropy along the vocabulary (plans found
    automatically only).
    """

    plan: Mapping[str, str] | Literal["auto"] = "auto"
    sequence: bool = False
    vocabulary: bool = True
