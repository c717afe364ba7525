"""The numbers of the demo: what ``paceline train`` trains when nothing is said.

They are the defaults of the schema, so ``Config()`` is the demo. Change them here and in
``recipes/demo.yaml``, which a test holds equal.
"""

from __future__ import annotations

from typing import Any, Final

MODEL: Final = "paceline.models.gpt:GPT"
MODEL_ARGS: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "context": 64,
    "layers": 3,
    "heads": 4,
    "width": 128,
    "dropout": 0.0,
}
LOSS: Final = "paceline.models.gpt:token_cross_entropy"
DATA: Final = "paceline.data.text:stdlib_source"
DATA_ARGS: Final[dict[str, Any]] = {"context": 64, "val_fraction": 0.01}
LR: Final = 3e-3
WARMUP_STEPS: Final = 20
MIN_RATIO: Final = 0.1
GLOBAL_BATCH: Final = 32
STEPS: Final = 250
CLIP_NORM: Final = 1.0
CHECKPOINT_EVERY: Final = 100

INSTEAD: Final[dict[str, dict[str, Any]]] = {
    "schedule": {"name": "constant", "warmup_steps": 0, "min_ratio": 0.0},
    "train": {"steps": None, "clip_norm": None},
}
"""What stands for the demo's numbers in a config with a model or data of its own."""
