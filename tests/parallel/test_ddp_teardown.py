"""A DDP module lets go of its reducer before its process group: see paceline.ddp_teardown."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.launch.local import call
from paceline.parallel.replicate import replicate


def order_of_freeing(wrapped: DistributedDataParallel) -> list[str]:
    freed: list[str] = []
    watches = [
        weakref.ref(wrapped.reducer, lambda _: freed.append("reducer")),
        weakref.ref(wrapped.process_group, lambda _: freed.append("group")),
    ]
    dist.destroy_process_group()
    wrapped.__dict__.clear()  # what happens when nobody holds it any more
    return freed if watches else []


def test_what_the_engine_wraps() -> None:
    def ranks() -> list[str]:
        dist.init_process_group("gloo")
        return order_of_freeing(replicate(nn.Linear(2, 2), torch.device("cpu")))

    assert call(ranks, nproc=2) == ["reducer", "group"]


def test_what_a_script_wraps() -> None:
    def ranks() -> list[str]:
        dist.init_process_group("gloo")
        return order_of_freeing(DistributedDataParallel(nn.Linear(2, 2)))

    assert call(ranks, nproc=2) == ["reducer", "group"]
