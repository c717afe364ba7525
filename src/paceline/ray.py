"""Paceline with Ray Train: a ``TorchTrainer`` for a config, and reports for one's own.

    import paceline.ray

    trainer = paceline.ray.trainer("my.yaml", run_dir="/shared/runs/first", num_workers=4)
    result = trainer.fit()
    result.metrics["loss"], result.checkpoint

``paceline train my.yaml --on ray`` does the same from the command line. In a training function of
one's own nothing is needed: ``paceline.Trainer`` and ``paceline.Engine`` find the world that Ray
Train has made. The ``RayReport`` callback hands metrics and checkpoints to Ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import dump, load_checked, resolve, with_code
from paceline.errors import MissingExtra
from paceline.launch.engines.ray_orders import RankOrders
from paceline.launch.run_folder import RunFolder
from paceline.trainer.ray_report import RayReport

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

__all__ = ["RayReport", "trainer"]


def trainer(
    config: str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str],
    num_workers: int,
    use_gpu: bool = False,
    overrides: Sequence[str] = (),
) -> TorchTrainer:
    """A ``ray.train.torch.TorchTrainer`` whose workers are the ranks of a run; call its ``fit()``.

    ``config`` is a config's file (``None``: the demo), ``overrides`` are like those of
    ``--set``, and ``run_dir`` is a folder that all nodes share: a new one, or that of a run to go
    on with. Ray's own records are in it too. Resources, placement, restarts and storage
    come from ``launch.ray`` and ``launch.max_restarts``.
    """
    try:
        from paceline.launch.engines.ray_trainer import torch_trainer
    except ImportError as error:
        raise MissingExtra(f"Ray Train ({error})", "ray") from error
    device = "cuda" if use_gpu else "cpu"
    given = [*overrides, f"launch.nproc={num_workers}", f"launch.device={device}"]
    run = RunFolder(Path(run_dir).absolute())
    devices = num_workers if use_gpu else 0
    source = run.config if config is None and run.was_used else config
    loaded = with_code(resolve(load_checked(source, given, devices=devices), devices=devices))
    run.path.mkdir(parents=True, exist_ok=True)
    run.save_config(dump(loaded))
    orders = RankOrders(
        run=str(run.path),
        folder=os.getcwd(),
        shipped=loaded.launch.ray.working_dir is not None,
        copies=loaded.launch.ray.storage_path is not None,
    )
    return torch_trainer(loaded, orders, use_gpu=use_gpu)
