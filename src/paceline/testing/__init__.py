"""Testing on several ranks: live ranks in milliseconds, small models, faults, leak checks.

With pytest: mark a test ``@pytest.mark.world(2)`` and use the ``ranks`` fixture. Without:
``run_ranks``, or a ``RankPool`` of your own. Names load on first use, so that the pytest
plugin costs nothing until it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.testing.compare import assert_same as assert_same
    from paceline.testing.faults import FaultPlan as FaultPlan
    from paceline.testing.faults import InjectedFault as InjectedFault
    from paceline.testing.faults import delay_at as delay_at
    from paceline.testing.faults import exit_at as exit_at
    from paceline.testing.faults import hang_at as hang_at
    from paceline.testing.faults import kill_at as kill_at
    from paceline.testing.faults import raise_at as raise_at
    from paceline.testing.hosts import Host as Host
    from paceline.testing.hosts import Hosts as Hosts
    from paceline.testing.hosts import hosts_available as hosts_available
    from paceline.testing.leaks import LeakCheck as LeakCheck
    from paceline.testing.models import make_images as make_images
    from paceline.testing.models import make_mlp as make_mlp
    from paceline.testing.models import make_resnet as make_resnet
    from paceline.testing.models import make_vectors as make_vectors
    from paceline.testing.nccl_order import CommunicationRecord as CommunicationRecord
    from paceline.testing.nccl_order import find_deadlock as find_deadlock
    from paceline.testing.pool import RankPool as RankPool
    from paceline.testing.pool import run_ranks as run_ranks

_HOME = {
    "CommunicationRecord": "nccl_order",
    "FaultPlan": "faults",
    "Host": "hosts",
    "Hosts": "hosts",
    "InjectedFault": "faults",
    "LeakCheck": "leaks",
    "RankPool": "pool",
    "assert_same": "compare",
    "delay_at": "faults",
    "exit_at": "faults",
    "find_deadlock": "nccl_order",
    "hang_at": "faults",
    "hosts_available": "hosts",
    "kill_at": "faults",
    "make_images": "models",
    "make_mlp": "models",
    "make_resnet": "models",
    "make_vectors": "models",
    "raise_at": "faults",
    "run_ranks": "pool",
}

__all__ = [
    "CommunicationRecord",
    "FaultPlan",
    "Host",
    "Hosts",
    "InjectedFault",
    "LeakCheck",
    "RankPool",
    "assert_same",
    "delay_at",
    "exit_at",
    "find_deadlock",
    "hang_at",
    "hosts_available",
    "kill_at",
    "make_images",
    "make_mlp",
    "make_resnet",
    "make_vectors",
    "raise_at",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paceline.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value
