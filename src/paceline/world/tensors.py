"""Which tensors collectives accept, and what they look like on the wire.

Collectives that only move data move bytes: any dtype, float8 and uint16 included, travels as
``uint8``. Only reductions look at dtypes.
"""

from __future__ import annotations

import torch

from paceline.errors import WorldError
from paceline.formatting import one_of

REDUCE_OPS = ("sum", "mean", "max", "min", "product")

_HALF = (torch.float16, torch.bfloat16)
_REDUCED = (
    *_HALF,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def describe(tensor: object) -> str:
    """``float32 (3, 4) on cpu``: what ranks compare, and what messages say."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)}"


def tensor_problem(call: str, tensor: object) -> WorldError | None:
    """Why ``tensor`` cannot travel, if it cannot."""
    if not isinstance(tensor, torch.Tensor):
        return WorldError(
            f"{call} takes a torch.Tensor, not {type(tensor).__name__}. For other values use the "
            "object forms: broadcast_object, all_gather_object, gather_object, scatter_object."
        )
    if type(tensor).__module__.startswith("torch.distributed.tensor"):
        return WorldError(f"{call} takes plain tensors, not a DTensor: pass tensor.to_local().")
    if tensor.layout != torch.strided:
        return WorldError(
            f"{call} takes dense tensors, not layout {tensor.layout}: pass tensor.to_dense()."
        )
    if tensor.is_quantized:
        return WorldError(f"{call} takes no quantized tensors: pass tensor.int_repr().")
    if tensor.device.type == "meta":
        return WorldError(f"{call}: a tensor on the meta device holds no data.")
    return None


def write_problem(call: str, tensor: torch.Tensor) -> WorldError | None:
    """Why a result cannot be written into ``tensor``, if it cannot."""
    overlapping = any(
        stride == 0 and length > 1
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    )
    if overlapping:
        return WorldError(
            f"{call} writes its result into the tensor, and this one is expanded: several of its "
            "elements share one place in memory. Pass tensor.contiguous() and use what is returned."
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return WorldError(
            f"{call} writes its result into the tensor, and this one was made in inference mode. "
            "Pass tensor.clone() and use what is returned."
        )
    return None


def reduce_problem(call: str, op: object, dtype: torch.dtype) -> WorldError | None:
    """Why ``op`` has no answer for ``dtype``, if it has none."""
    name = str(dtype).removeprefix("torch.")
    if op not in REDUCE_OPS:
        return WorldError(f"{call}: op={op!r} must be {one_of(REDUCE_OPS)}.")
    if dtype not in _REDUCED:
        return WorldError(
            f"{call}: {name} can be moved but not reduced. Convert it first, to float32 or int64."
        )
    if dtype == torch.bool and op not in ("max", "min"):
        return WorldError(
            f"{call}: {op} of bool has no clear meaning. Use op='max' for any, op='min' for all, "
            "or convert to int64 to count."
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return WorldError(
            f"{call}: the mean of {name} values need not be whole. Convert to a floating-point "
            "dtype, or use op='sum' and divide."
        )
    if dtype.is_complex and op in ("max", "min"):
        return WorldError(f"{call}: complex numbers have no {op}. Reduce .real, .imag or .abs().")
    return None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a flat ``uint8`` tensor; shares memory when it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.contiguous().reshape(-1)
    if flat.numel() == 1:  # contiguous whatever its stride, but not to view
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def from_bytes(
    data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The reverse of ``as_bytes``; ``data`` must own its memory from its first byte."""
    return data.view(dtype).reshape(shape).to(device)


def combine(pieces: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce equal-shaped tensors in their order, as one process would; rounds once at the end."""
    dtype = pieces[0].dtype
    stack = torch.stack(pieces)
    if dtype in _HALF:
        stack = stack.float()
    if op == "sum":
        # An int8 sum stays int8, as it does when ranks add in place.
        result = stack.sum(0) if stack.is_floating_point() else stack.sum(0, dtype=stack.dtype)
    elif op == "mean":
        result = stack.sum(0) / len(pieces)
    elif op == "max":
        result = stack.amax(0)
    elif op == "min":
        result = stack.amin(0)
    else:
        result = stack.prod(0, dtype=stack.dtype)
    return result.to(dtype)
