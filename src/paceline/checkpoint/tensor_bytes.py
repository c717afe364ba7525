"""Tensors as the bytes that a checkpoint holds of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import TensorEntry
from paceline.errors import CheckpointError


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, to be read from or written into."""
    if not tensor.is_contiguous():
        raise ValueError(f"memory of a tensor with strides {tensor.stride()}: make it contiguous.")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one row.

    Unlike ``reshape(-1)``, also of one element with an odd stride, which counts as contiguous.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Made of bytes: for some dtypes torch warns of what it cannot compute with them."""
    memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    return memory.view(dtype).reshape(shape)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """The dtype that a tensor was saved with."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {entry.dtype!r}.")
    return dtype
