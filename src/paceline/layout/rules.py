"""Which layouts are sound: every refusal has a name, and says why and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import LayoutError
from paceline.layout.layout import Layout

ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""Schedules that compute a stage's input gradients and weight gradients apart."""


@dataclass(frozen=True)
class Request:
    """A layout and what else a rule may look at."""

    layout: Layout
    schedule: str = "1f1b"
    own_loop: bool = False
    """Whether the user runs backward by hand (``prepare``)."""
    device_map: bool = False
    offload: str | None = None
    recompute: str | None = None
    shard_dtype: str | None = None
    compress: str | None = None
    """The formats in which gradients travel, where not as they are."""


@dataclass(frozen=True)
class Rule:
    """``broken`` says what is wrong with a request, or gives ``None``."""

    name: str
    broken: Callable[[Request], str | None]


def _axis_not_available(request: Request) -> str | None:
    for axis in ("cp", "ep"):
        value = getattr(request.layout, axis)
        if value > 1:
            return (
                f"{axis}={value} is not available in this version, which trains dp, zero, "
                f"replicas, tp and pp. Leave {axis} out."
            )
    return None


def _replicas_need_zero(request: Request) -> str | None:
    layout = request.layout
    if layout.replicas == 1 or layout.zero:
        return None
    return (
        f"replicas={layout.replicas} says how many copies of a sharded model there are, but "
        "zero=0 shards nothing: every data-parallel rank holds a copy. Add zero=1, 2 or 3, or "
        "leave replicas out."
    )


def _zero_bubble_keeps_parameters(request: Request) -> str | None:
    layout, schedule = request.layout, request.schedule
    if layout.pp == 1 or layout.zero < 3 or schedule not in ZERO_BUBBLE:
        return None
    return (
        f"the schedule {schedule} computes weight gradients after FSDP2 has let go of zero=3's "
        "gathered parameters, which gives wrong gradients without a word. Use zero=2 (the same "
        "state, parameters kept through the step), or the schedule 1f1b or interleaved-1f1b."
    )


def _pipeline_runs_backward(request: Request) -> str | None:
    if not request.own_loop or request.layout.pp == 1:
        return None
    return (
        f"pp={request.layout.pp} runs forward and backward of all microbatches by its schedule, "
        "so a loop of your own cannot call backward(). Use paceline.Engine and its step()."
    )


def _own_loop_has_no_sample(request: Request) -> str | None:
    if not request.own_loop or request.layout.tp == 1:
        return None
    return (
        f"tp={request.layout.tp} finds what to split by running the model on the first batch, "
        "and computes the loss on the split output, which a loop of your own does outside. Use "
        "paceline.Engine and its step()."
    )


def _device_map_is_one_process(request: Request) -> str | None:
    if not request.device_map or request.layout == Layout():
        return None
    return (
        "a device map spreads a model over the devices of one process; a layout spreads it over "
        f"processes, here {request.layout.world_size}. Use one of them."
    )


def _offload_needs_zero(request: Request) -> str | None:
    if request.offload != "parameters" or request.layout.zero:
        return None
    return (
        "offload='parameters' keeps the pieces of a sharded model in the CPU's memory, but zero=0 "
        "shards nothing. Add zero=3 (on one rank, too), or use offload='optimizer'."
    )


def _selective_needs_one_backward(request: Request) -> str | None:
    splits = request.layout.pp > 1 and request.schedule in ZERO_BUBBLE
    if request.recompute != "selective" or not splits:
        return None
    return (
        f"the schedule {request.schedule} goes through a stage's backward twice, for its inputs "
        "and for its weights, and selective activation checkpointing keeps what it has recomputed "
        "for one. Use checkpoint_activations='full', or the schedule 1f1b or interleaved-1f1b."
    )


def _pipeline_keeps_dtypes(request: Request) -> str | None:
    if request.layout.pp == 1 or request.shard_dtype is None:
        return None
    return (
        f"Sharding(dtype={request.shard_dtype!r}) changes the dtype of what stages of a pipeline "
        "hand on, which is fixed when the model is cut. Use precision='bf16', which computes in "
        "bf16 on every layout, and leave dtype out."
    )


def _matrices_need_whole_gradients(request: Request) -> str | None:
    if not request.layout.zero or "powersgd" not in (request.compress or ""):
        return None
    return (
        f"compress: {request.compress} factors whole matrices, but with zero={request.layout.zero} "
        "a gradient travels as pieces to the ranks that keep them. Use zero=0, or int8, sign, topk "
        "or randomk."
    )


def _residuals_are_cut_once(request: Request) -> str | None:
    layout = request.layout
    if request.compress is None or not layout.zero or layout.tp == 1:
        return None
    return (
        f"compress: {request.compress} keeps what it has not sent of each gradient; with tp="
        f"{layout.tp} and zero={layout.zero} that is cut twice, in a way that no other layout "
        "could load. Use zero=0 with tp, or zero without tp, or leave compress out."
    )


def _copies_are_summed_by_fsdp(request: Request) -> str | None:
    if request.compress is None or request.layout.copies == 1 or not request.layout.zero:
        return None
    return (
        f"compress: {request.compress} would apply within each of the {request.layout.copies} "
        "copies of the sharded model only: FSDP2 sums between copies by itself, where it matters "
        "most. Leave replicas out, or use zero=0."
    )


RULES = (
    Rule("axis-not-available", _axis_not_available),
    Rule("replicas-need-zero", _replicas_need_zero),
    Rule("zero-bubble-keeps-parameters", _zero_bubble_keeps_parameters),
    Rule("selective-needs-one-backward", _selective_needs_one_backward),
    Rule("pipeline-keeps-dtypes", _pipeline_keeps_dtypes),
    Rule("offload-needs-zero", _offload_needs_zero),
    Rule("pipeline-runs-backward", _pipeline_runs_backward),
    Rule("own-loop-has-no-sample", _own_loop_has_no_sample),
    Rule("device-map-is-one-process", _device_map_is_one_process),
    Rule("matrices-need-whole-gradients", _matrices_need_whole_gradients),
    Rule("residuals-are-cut-once", _residuals_are_cut_once),
    Rule("copies-are-summed-by-fsdp", _copies_are_summed_by_fsdp),
)


def problem_with(request: Request) -> tuple[str, str] | None:
    """The name of the first rule that ``request`` breaks, and the reason; ``None`` if sound."""
    for rule in RULES:
        if (reason := rule.broken(request)) is not None:
            return rule.name, reason
    return None


def check_rules(request: Request) -> None:
    """Raise :class:`LayoutError` for a request that breaks a rule."""
    if (found := problem_with(request)) is not None:
        name, reason = found
        raise LayoutError(f"layout {str(request.layout)!r}: {reason} [rule: {name}]")
