"""Elastic training in Horovod's words: ``hvd.elastic.run``, states and a sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.compat.horovod.common.elastic import ObjectState, State, run_fn
from paceline.compat.horovod.torch.elastic.sampler import ElasticSampler
from paceline.compat.horovod.torch.elastic.state import TorchState
from paceline.compat.horovod.torch.mpi_ops import init, shutdown


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a training function on a state, and go on from its last commit when ranks are lost.

    The first argument of ``func`` is the state. Before it is called, the newest commit of the run
    is restored and the state brought to all ranks.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
