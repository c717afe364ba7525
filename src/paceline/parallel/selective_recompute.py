"""Selective recomputation: the operators whose results are kept, because they cost most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.errors import TrainingError
from paceline.torch_internals import argument_names, is_operator, overloads_of

# By name, since which of them exist depends on torch's version and build.
_PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.linear",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten.convolution",
)
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
)
_COLLECTIVES = (
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
)
DEFAULT_KEPT = (*_PRODUCTS, *_ATTENTION, *_COLLECTIVES)
"""The operators whose results are kept unless others are named."""


def resolve(keep: Sequence[Any] | None) -> frozenset[Any]:
    """The operators in ``keep`` as torch dispatches them; by default ``DEFAULT_KEPT``."""
    if keep is None:
        names = (name for name in DEFAULT_KEPT if _packet(name) is not None)
        return frozenset(op for name in names for op in _overloads(name)) | _higher_order()
    if isinstance(keep, str) or not keep:
        raise TrainingError(
            f"recompute: keep={keep!r} must be a list of operators, like ['aten.mm', "
            "torch.ops.aten.bmm]; to keep nothing, use mode='full'."
        )
    kept = frozenset(op for wanted in keep for op in _overloads(wanted))
    for op in kept:
        if _draws_random_numbers(op) and argument_names(op).count("dropout_p") == 0:
            raise TrainingError(
                f"recompute: {op} draws random numbers; were its result kept, the recomputation "
                "would hand its numbers to the next operator that draws. Leave it out of keep."
            )
    return kept


def selective_contexts(keep: frozenset[Any]) -> tuple[Any, Any]:
    """The contexts of a forward that keeps the results of ``keep`` and of its recomputation."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in keep and not _uses_dropout(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def _uses_dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: then it is drawn again, like all that follow it."""
    if not _draws_random_numbers(op):
        return False
    names = argument_names(op)
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given)


def _draws_random_numbers(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _overloads(wanted: Any) -> Iterator[Any]:
    if is_operator(wanted):
        yield wanted
        return
    found = overloads_of(_packet(wanted) if isinstance(wanted, str) else wanted)
    if found is None:
        raise TrainingError(
            f"recompute: keep names {wanted!r}, which is no operator of torch. Write it like "
            "'aten.mm' or torch.ops.aten.mm."
        )
    yield from found


def _packet(name: str) -> Any:
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").split("."):
        found = getattr(found, part, None)
    return found


def _higher_order() -> frozenset[Any]:
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset() if flex is None else frozenset([flex])
