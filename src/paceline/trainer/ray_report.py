"""What Ray Train hears of a run: metrics and checkpoints, where users of Ray look for them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.trainer.callbacks import Callback

if TYPE_CHECKING:
    from paceline.engine import StepResult

POINTER = "paceline_checkpoint.json"
"""In what Ray has for a checkpoint that lies outside of its storage: where that is."""


class RayReport(Callback):
    """Reports evaluations and checkpoints to Ray Train, from inside its workers.

    For the ``callbacks`` of a ``paceline.Trainer`` in the training function of a
    ``ray.train.torch.TorchTrainer``. ``result.metrics`` then has ``step``, ``epoch``, the ``loss``
    of the last step, each validation metric as ``val_<name>``, and the step of the checkpoint as
    ``checkpoint_step``. ``result.checkpoint`` is the run's own checkpoint where that lies in Ray's
    storage (nothing is copied), else a small folder with its address; ``copy=True`` has Ray copy
    it into its storage.
    """

    def __init__(self, *, copy: bool = False) -> None:
        self._copy = copy
        self._result: StepResult | None = None
        self._evaluated: dict[str, float] = {}

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Remember the step; its loss is not asked for before it is reported."""
        self._result = result

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report the validation metrics."""
        import ray.train

        self._evaluated = {f"val_{name}": float(value) for name, value in metrics.items()}
        ray.train.report(self._metrics(trainer))

    def on_checkpoint(self, trainer: Any, path: Path | str) -> None:
        """Report a checkpoint that is complete. Rank 0 names it for all."""
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        name = str(path).rstrip("/").rpartition("/")[2]
        metrics = self._metrics(trainer)
        if (step := name.removeprefix("step-")).isdecimal():
            # It is written beside training, and may be some steps old by now.
            metrics["checkpoint_step"] = int(step)
        if trainer.engine.world.rank != 0:
            ray.train.report(metrics)
            return
        storage = ray.train.get_context().get_storage()
        inside = isinstance(path, Path) and path.is_relative_to(storage.experiment_fs_path)
        if inside:
            mode = CheckpointUploadMode.NO_UPLOAD
            checkpoint = Checkpoint(str(path), filesystem=storage.storage_filesystem)
            ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=mode)
        elif self._copy and isinstance(path, Path):
            checkpoint = Checkpoint.from_directory(str(path))
            ray.train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)
        else:
            with tempfile.TemporaryDirectory(prefix="paceline-ray-") as folder:
                (Path(folder) / POINTER).write_text(json.dumps({"checkpoint": str(path)}))
                ray.train.report(
                    metrics,
                    checkpoint=Checkpoint.from_directory(folder),
                    checkpoint_dir_name=name,
                )

    def _metrics(self, trainer: Any) -> dict[str, Any]:
        loss = {} if self._result is None else {"loss": self._result.loss}
        return {"step": trainer.step, "epoch": trainer.epoch, **loss, **self._evaluated}
