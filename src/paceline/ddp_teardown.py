"""The end of a DistributedDataParallel, in an order that cannot hang.

After ``destroy_process_group()`` the reducer of a DDP module is the last to hold the process group
and ends it while it holds the GIL. It waits for Gloo's threads, one of which may be waiting for the
GIL to drop the last all-reduce. On a busy machine, 5 of 40 short scripts never ended (torch 2.13;
``benchmarks/ddp_end.py``). A group that Python is the last to hold is ended without the GIL.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def free_reducer_before_group(wrapped: DistributedDataParallel) -> None:
    """Have ``wrapped`` let go of its reducer first, and of its process group after that.

    Python frees attributes in the order in which they were set, and DDP sets the group first.
    """
    attributes = wrapped.__dict__
    attributes["process_group"] = attributes.pop("process_group")


def free_reducers_before_groups() -> None:
    """The same for every module that is wrapped in this process from now on."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        free_reducer_before_group(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
