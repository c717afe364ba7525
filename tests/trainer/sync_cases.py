"""A short run whose wire is looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline


def fit(
    model: nn.Module,
    data: torch.utils.data.Dataset[Any],
    run_dir: str,
    steps: int,
    *,
    save_every: int,
    **options: Any,
) -> None:
    """Train up to ``steps`` steps, going on from what is in ``run_dir``."""
    trainer = paceline.Trainer(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        global_batch=8,
        run_dir=run_dir,
        progress=False,
        checkpoint=paceline.Checkpointing(every=save_every),
        **options,
    )
    trainer.fit(data, steps=steps, resume=True)
