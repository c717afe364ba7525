"""How gradients are written for the way between ranks: ``hvd.Compression``."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Compresses a tensor before it is reduced, and decompresses what comes back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was before, in its own dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a smaller dtype; all others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor in the smaller dtype, and its own dtype."""
        smaller = tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor
        return smaller, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in the dtype it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors in 16 bits."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16, which has the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by the names that scripts use."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
