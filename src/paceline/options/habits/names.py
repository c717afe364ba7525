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

_LOADERS = "It is an option of the DataLoader, which prepare takes as it is."
_OWN_TRACKER = (
    "An Accelerator logs nothing: call a tracker of your own where accelerator.is_main_process, or "
    "use paceline.Trainer(model, ..., trackers=[…])."
)
_SHARDED = "How models are sharded is layout: paceline.Accelerator(layout='dp=2,zero={}')."
_COMPILED = "Compile the prepared model: model = accelerator.prepare(model); model.compile()."
SENTENCES: dict[str, dict[str, str]] = {
    "Accelerator": {
        "cpu": "Ranks use the GPUs that they find, else the CPU: hide them with "
        "CUDA_VISIBLE_DEVICES= in the environment.",
        "device_placement": "Models and batches are put on accelerator.device. Leave it out.",
        "split_batches": "It is batch_size_is: paceline.Accelerator(batch_size_is='global') for "
        "True, which is the default, and 'per_device' for False.",
        "mixed_precision": "It is precision: paceline.Accelerator(precision='bf16'), or 'fp16' or "
        "'fp32' (for 'no').",
        "gradient_accumulation_steps": "It is accumulate: paceline.Accelerator(accumulate=4).",
        "gradient_accumulation_plugin": "It is accumulate: paceline.Accelerator(accumulate=4).",
        "even_batches": "A short last batch counts for what it is. Leave it out.",
        "dispatch_batches": _LOADERS,
        "dataloader_config": _LOADERS,
        "use_stateful_dataloader": "accelerator.load_state puts loaders where they stood. Leave it "
        "out.",
        "rng_types": "The order of samples is by seed: paceline.Accelerator(seed=1).",
        "use_seedable_sampler": "The order of samples is by seed: paceline.Accelerator(seed=1).",
        "deepspeed_plugin": _SHARDED.format(2),
        "deepspeed_plugins": _SHARDED.format(2),
        "fsdp_plugin": _SHARDED.format(3),
        "torch_tp_plugin": "Tensor parallelism is paceline.Engine(model, ..., layout='tp=2').",
        "megatron_lm_plugin": "Tensor and pipeline parallelism are "
        "paceline.Engine(model, ..., layout='pp=2,tp=2').",
        "parallelism_config": _SHARDED.format(3),
        "log_with": _OWN_TRACKER,
        "logging_dir": _OWN_TRACKER,
        "project_dir": "The folder is given where it is used: accelerator.save_state('folder').",
        "project_config": "The folder is given where it is used: "
        "accelerator.save_state('folder', keep=3).",
        "step_scheduler_with_optimizer": "A schedule counts where you call its step(): once a "
        "step, whatever the number of ranks. Leave it out.",
        "kwargs_handlers": "What they set are arguments of their own: "
        "paceline.Accelerator(loss_scaling=paceline.LossScaling(init_scale=1024.0)).",
        "dynamo_backend": _COMPILED,
        "dynamo_plugin": _COMPILED,
    },
}
"""By the call and the name, the whole answer where that of other calls does not fit."""


def habit_of(name: str) -> Habit | None:
    """What is known of ``name``, in any spelling: ``--Max-Epochs`` is ``max_epochs``."""
    return HABITS.get(name.strip("-").lower().replace("-", "_"))
