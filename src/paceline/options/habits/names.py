"""The names that people know from other libraries, and what is meant by each.

``names.txt`` is the one table. It has the answers of ``Trainer``, ``fit``, ``Engine``, ``prepare``
and ``loader`` to an argument that they do not have, of a config to an unknown key and of
``paceline train`` to an unknown option; and the page docs/coming-from/names.md.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.options.habits.meanings import BATCHES, EVALUATION_AND_SAVING, TRAINING, Meaning
from paceline.options.habits.spreading import SPREADING

LIBRARIES = {
    "A": "Accelerate",
    "D": "DeepSpeed",
    "F": "FSDP",
    "G": "Megatron-LM",
    "H": "Hugging Face Trainer",
    "K": "Keras",
    "L": "Lightning",
    "P": "many scripts",
    "R": "Ray Train",
    "T": "torchrun and DDP",
    "V": "Horovod",
}
"""By the letter in the table, where a name is known from."""

MEANINGS: dict[str, Meaning] = {**TRAINING, **BATCHES, **EVALUATION_AND_SAVING, **SPREADING}


@dataclass(frozen=True)
class Habit:
    """A name of another library: where it is known from, and what is meant by it here."""

    name: str
    meant: str
    known_from: tuple[str, ...]
    in_config: bool = True
    """Whether a config is asked for it: some of these names are keys of ours."""

    @property
    def meaning(self) -> Meaning:
        """What it is here."""
        return MEANINGS[self.meant]


def _rows() -> Iterator[Habit]:
    table = importlib.resources.files(__package__).joinpath("names.txt")
    for line in table.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, meant, *letters = line.split()
        known_from = tuple(LIBRARIES[letter] for letter in letters if letter in LIBRARIES)
        yield Habit(name, meant, known_from, "!config" not in letters)


HABITS: dict[str, Habit] = {habit.name: habit for habit in _rows()}
"""By name."""

SECTIONS = {
    "ckpt": "checkpoint",
    "dataset": "data",
    "lr_scheduler": "schedule",
    "optim": "optimizer",
    "scheduler": "schedule",
    "trainer": "train",
    "training": "train",
}
"""By their name, the section of a config that holds the same."""

IN_SECTION = {
    "_target_": ("target",),
    "class": ("target",),
    "class_path": ("target",),
    "checkpoint_at_end": ("save_at_end",),
    "checkpoint_score_order": ("mode",),
    "dirpath": ("where",),
    "init_args": ("args",),
    "interval": ("every",),
    "kwargs": ("args",),
    "max_to_keep": ("keep",),
    "metric": ("best",),
    "min_lr": ("min_ratio",),
    "monitor": ("best", "metric"),
    "params": ("args",),
    "path": ("target",),
    "save_last": ("save_at_end",),
    "save_freq": ("every",),
    "size": ("global_batch",),
    "tracking_uri": ("uri",),
    "type": ("name",),
    "url": ("uri",),
}
"""By their name, ours in the same section or class of options."""

_DATA = "dataloader dataloaders dataset datamodule eval_dataset test_dataset val_dataset x"
_PASS = {
    **dict.fromkeys(_DATA.split(), "data"),
    **dict.fromkeys(("checkpoint", "checkpoint_path", "ckpt", "ckpt_path", "step"), "which"),
    **dict.fromkeys(("devices", "gpus", "num_gpus", "num_processes", "world_size"), "nproc"),
    **dict.fromkeys(("ema", "use_ema"), "weights"),
}
_BATCHES = "limit limit_batches limit_test_batches limit_val_batches max_batches max_steps steps"
_FILE = "file filename output output_dir output_file output_path path save_path"

IN_CALL: dict[str, dict[str, str]] = {
    "EarlyStopping": {
        "early_stopping_patience": "patience",
        "early_stopping_threshold": "min_delta",
        "metric_for_best_model": "metric",
        "min_change": "min_delta",
        "monitor": "metric",
        "quantity": "metric",
        "threshold": "min_delta",
        "tolerance": "min_delta",
        "wait": "patience",
    },
    "evaluate": {**_PASS, **dict.fromkeys(_BATCHES.split(), "batches")},
    "predict": {**_PASS, **dict.fromkeys(_FILE.split(), "out"), "predict_fn": "forward"},
}
"""By the call and their name, ours in the same call."""


def habit_of(name: str) -> Habit | None:
    """What is known of ``name``, in any spelling: ``--Max-Epochs`` is ``max_epochs``."""
    return HABITS.get(name.strip("-").lower().replace("-", "_"))
