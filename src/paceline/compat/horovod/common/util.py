"""Small questions that scripts ask of ``horovod.common.util``."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from paceline.compat.horovod.common import basics

_T = TypeVar("_T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a Horovod for this framework here."""
    return ext_base_name == "torch" and importlib.util.find_spec("torch") is not None


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether this process has a GPU."""
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """As ``hvd.mpi_built()``."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As ``hvd.gloo_built()``."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether tensors can travel over NCCL."""
    return bool(basics.nccl_built())


def split_list(items: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """``items`` in ``parts`` parts of nearly equal length."""
    size, more = divmod(len(items), parts)
    ends = [place * size + min(place, more) for place in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    """Whether something can be iterated over."""
    try:
        iter(value)
    except TypeError:
        return False
    return True
