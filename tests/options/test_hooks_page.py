"""The page that maps hooks of other libraries: all of theirs are there, and ours exist."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import paceline

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "lightning.md"
LIGHTNING = """
load_state_dict on_after_backward on_before_backward on_before_optimizer_step on_before_zero_grad on_exception
on_fit_end on_fit_start on_load_checkpoint on_predict_batch_end on_predict_batch_start on_predict_end
on_predict_epoch_end on_predict_epoch_start on_predict_start on_sanity_check_end on_sanity_check_start
on_save_checkpoint on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start
on_test_start on_train_batch_end on_train_batch_start on_train_end on_train_epoch_end on_train_epoch_start
on_train_start on_validation_batch_end on_validation_batch_start on_validation_end on_validation_epoch_end
on_validation_epoch_start on_validation_start setup state_dict state_key teardown
"""  # Lightning 2.6.6
LIGHTNING_MODULE = """
all_gather automatic_optimization backward clip_gradients configure_callbacks configure_gradient_clipping
configure_model configure_optimizers configure_sharded_model current_epoch device device_mesh dtype
example_input_array fabric freeze global_rank global_step hparams hparams_initial load_from_checkpoint
local_rank log log_dict logger loggers lr_scheduler_step lr_schedulers manual_backward on_after_backward
on_after_batch_transfer on_before_backward on_before_batch_transfer on_before_optimizer_step
on_before_zero_grad on_fit_end on_fit_start on_gpu on_load_checkpoint on_predict_batch_end
on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_model_eval
on_predict_start on_save_checkpoint on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end
on_test_epoch_start on_test_model_eval on_test_model_train on_test_start on_train_batch_end
on_train_batch_start on_train_end on_train_epoch_end on_train_epoch_start on_train_start
on_validation_batch_end on_validation_batch_start on_validation_end on_validation_epoch_end
on_validation_epoch_start on_validation_model_eval on_validation_model_train on_validation_model_zero_grad
on_validation_start optimizer_step optimizer_zero_grad optimizers predict_dataloader predict_step
prepare_data print remove_ignored_hparams save_hyperparameters setup strict_loading teardown
test_dataloader test_step to_onnx to_tensorrt to_torchscript toggle_optimizer toggled_optimizer
train_dataloader trainer training_step transfer_batch_to_device unfreeze untoggle_optimizer val_dataloader
validation_step
"""  # Lightning 2.6.6: what it has beside torch.nn.Module
HUGGING_FACE = """
on_epoch_begin on_epoch_end on_evaluate on_init_end on_log on_optimizer_step on_pre_optimizer_step on_predict
on_prediction_step on_push_begin on_save on_step_begin on_step_end on_substep_end on_train_begin on_train_end
"""  # transformers 5.22.2


def rows(title: str) -> list[tuple[str, str]]:
    table = PAGE.read_text(encoding="utf-8").split(f"| {title}")[1].split("\n\n")[0]
    return [(row.split("|")[1], row.split("|")[2]) for row in table.splitlines()[2:]]


def test_every_hook_of_theirs_is_there() -> None:
    both = LIGHTNING + LIGHTNING_MODULE
    for title, hooks in (("Lightning's `C", both), ("Hugging Face's `T", HUGGING_FACE)):
        named = {name for left, _ in rows(title) for name in re.findall(r"`(\w+)`", left)}
        assert set(hooks.split()) <= named


def test_what_it_names_of_ours_exists() -> None:
    arguments = {*signature(paceline.Trainer).parameters}
    for _, right in rows("Lightning's `C") + rows("Hugging Face's `T"):
        for path in re.findall(r"`((?:Callback|Trainer|Engine|paceline)\.[\w.]+)`", right):
            owner, _, name = path.rpartition(".")
            found: Any = paceline
            for part in [] if owner == "paceline" else owner.removeprefix("paceline.").split("."):
                found = getattr(found, part)
            assert hasattr(found, name) or path == "Trainer.epoch", path  # set when it is made
        assert set(re.findall(r"`(\w+)=`", right)) <= arguments
