"""The actor that has a run in the cluster: it calls ``fit`` there, and is asked to end it.

In the cluster rather than in the process of the command, so that a ``ray://`` address will do, and
so that ``paceline runs cancel`` finds it from any machine.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ray.train import TrainingFailedError

from paceline.config import Config
from paceline.launch.engines.ray_orders import RankOrders
from paceline.launch.engines.ray_trainer import torch_trainer


class RunInCluster:
    """One run of Ray Train."""

    def __init__(self, config: Config, orders: RankOrders, use_gpu: bool, restarts: int) -> None:
        # How long Ray Train waits for its workers; a busy machine may need more than its minute.
        patience = str(config.launch.rejoin_timeout)
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", patience)
        self._trainer = torch_trainer(config, orders, use_gpu=use_gpu, max_restarts=restarts)
        self._to_leave = False

    def fit(self) -> dict[str, Any]:
        """Train; what came of it, in plain values."""
        try:
            result = self._trainer.fit()
        except TrainingFailedError as error:
            logging.getLogger(__name__).exception("the run failed")
            rank, reason = _first_failure(error)
            return {"error": reason, "rank": rank, "traceback": str(error)}
        return {"error": "", "rank": 0, "traceback": "", "metrics": result.metrics}

    def leave(self) -> None:
        """Have the ranks save and leave."""
        self._to_leave = True

    def is_to_leave(self) -> bool:
        """For rank 0, which asks now and then."""
        return self._to_leave


def _first_failure(error: TrainingFailedError) -> tuple[int, str]:
    """The lowest rank that failed, and its error with the traceback that Ray has of it."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items()):
        return int(rank), f"rank {rank} failed: {failure}"
    return 0, f"Ray Train gave up: {error}"
