"""Which layouts are sound: every refusal has a name, and says why and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import LayoutError
from paceline.layout.layout import Layout
from paceline.options.engine import EngineOptions

ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""Schedules that compute a stage's input gradients and weight gradients apart."""


@dataclass(frozen=True)
class Combination:
    """A layout and the options that are to go with it."""

    layout: Layout
    options: EngineOptions = EngineOptions()
    own_loop: bool = False
    """Whether the user runs backward by hand (``prepare``)."""

    @property
    def formats(self) -> str | None:
        """The formats in which gradients travel, where not as they are."""
        return None if self.options.compress is None else self.options.compress.formats

    @property
    def splits_backward(self) -> bool:
        """Whether there is a pipeline that computes input and weight gradients apart."""
        return self.layout.pp > 1 and self.options.pipeline.schedule in ZERO_BUBBLE

    @property
    def is_local_from_the_start(self) -> bool:
        """Whether replicas train alone, without synchronous steps before."""
        return self.options.local_steps is not None and self.options.local_steps.start == 0

    def words(self, setting: str) -> str:
        """A setting of a rule as an engine was given it."""
        if setting == "layout":
            return f"layout {str(self.layout)!r}"
        if setting == "compress":
            return f"compress {self.formats}"
        if setting == "reduction":
            return f"reduction {', '.join(self.options.reduction.asked)}"
        return setting


@dataclass(frozen=True)
class Rule:
    """``broken`` says what is wrong with a case, or gives ``None``.

    ``settings`` are those that do not go together, by the names of an engine's options; a single
    one does not go at all. The layout is among them where it is a part of the reason.
    """

    name: str
    settings: tuple[str, ...]
    broken: Callable[[Combination], str | None]


def _axis_not_available(case: Combination) -> str | None:
    for axis in ("cp", "ep"):
        value = getattr(case.layout, axis)
        if value > 1:
            return (
                f"{axis}={value} is not available in this version, which trains dp, zero, "
                f"replicas, tp and pp. Leave {axis} out."
            )
    return None


def _replicas_need_zero(case: Combination) -> str | None:
    layout = case.layout
    if layout.replicas == 1 or layout.zero:
        return None
    return (
        f"replicas={layout.replicas} says how many copies of a sharded model there are, but "
        "zero=0 shards nothing: every data-parallel rank holds a copy. Add zero=1, 2 or 3, or "
        "leave replicas out."
    )


def _zero_bubble_keeps_parameters(case: Combination) -> str | None:
    if case.layout.zero < 3 or not case.splits_backward:
        return None
    schedule = case.options.pipeline.schedule
    return (
        f"the schedule {schedule} computes weight gradients after FSDP2 has let go of zero=3's "
        "gathered parameters, which gives wrong gradients without a word. Use zero=2 (the same "
        "state, parameters kept through the step), or the schedule 1f1b or interleaved-1f1b."
    )


def _pipeline_runs_backward(case: Combination) -> str | None:
    if not case.own_loop or case.layout.pp == 1:
        return None
    return (
        f"pp={case.layout.pp} runs forward and backward of all microbatches by its schedule, "
        "so a loop of your own cannot call backward(). Use paceline.Engine and its step()."
    )


def _own_loop_has_no_sample(case: Combination) -> str | None:
    if not case.own_loop or case.layout.tp == 1:
        return None
    return (
        f"tp={case.layout.tp} finds what to split by running the model on the first batch, "
        "and computes the loss on the split output, which a loop of your own does outside. Use "
        "paceline.Engine and its step()."
    )


def _device_map_is_one_process(case: Combination) -> str | None:
    if case.options.device_map is None or case.layout == Layout():
        return None
    return (
        "a device map spreads a model over the devices of one process; a layout spreads it over "
        f"processes, here {case.layout.world_size}. Use one of them."
    )


def _offload_needs_zero(case: Combination) -> str | None:
    if case.options.sharding.offload != "parameters" or case.layout.zero:
        return None
    return (
        "offload='parameters' keeps the pieces of a sharded model in the CPU's memory, but zero=0 "
        "shards nothing. Add zero=3 (on one rank, too), or use offload='optimizer'."
    )


def _selective_needs_one_backward(case: Combination) -> str | None:
    recompute = case.options.checkpoint_activations
    if recompute is None or recompute.mode != "selective" or not case.splits_backward:
        return None
    return (
        f"the schedule {case.options.pipeline.schedule} goes through a stage's backward twice, for "
        "its inputs and for its weights, and selective activation checkpointing keeps what it has "
        "recomputed for one. Use checkpoint_activations='full', or the schedule 1f1b or "
        "interleaved-1f1b."
    )


def _pipeline_keeps_dtypes(case: Combination) -> str | None:
    if case.layout.pp == 1 or case.options.sharding.dtype is None:
        return None
    return (
        f"Sharding(dtype={case.options.sharding.dtype!r}) changes the dtype of what stages of a "
        "pipeline hand on, which is fixed when the model is cut. Use precision='bf16', which "
        "computes in bf16 on every layout, and leave dtype out."
    )


def _matrices_need_whole_gradients(case: Combination) -> str | None:
    if not case.layout.zero or "powersgd" not in (case.formats or ""):
        return None
    return (
        f"{case.formats} factors whole matrices, but with zero={case.layout.zero} a "
        "gradient is sent in pieces to the ranks that keep them. Use zero=0, or int8, sign, topk "
        "or randomk."
    )


def _residuals_are_cut_once(case: Combination) -> str | None:
    layout = case.layout
    if case.formats is None or not layout.zero or layout.tp == 1:
        return None
    return (
        f"{case.formats} keeps what it has not sent of each gradient; with tp={layout.tp} and "
        f"zero={layout.zero} that is cut twice, in a way that no other layout could load. Use "
        "zero=0 with tp, or zero without tp, or leave compress out."
    )


def _copies_are_summed_by_fsdp(case: Combination) -> str | None:
    if case.formats is None or case.layout.copies == 1 or not case.layout.zero:
        return None
    return (
        f"{case.formats} would apply within each of the {case.layout.copies} "
        "copies of the sharded model only: FSDP2 sums between copies by itself, where it matters "
        "most. Leave replicas out, or use zero=0."
    )


def _sums_need_copies(case: Combination) -> str | None:
    zero = case.layout.zero
    if not zero or not case.options.reduction.asked:
        return None
    return (
        f"with zero={zero} FSDP2 sums gradients unit by unit, at the ranks that keep them. Leave "
        "reduction out; replicas=2 and up keeps gathering and most sums within a copy of the "
        "model, such as a node."
    )


def _tuning_needs_overlap(case: Combination) -> str | None:
    layout = case.layout
    if not case.options.reduction.tuned or layout.tp == layout.pp == 1:
        return None
    return (
        "tuning weighs buckets that leave early against few messages, but with "
        f"tp={layout.tp} and pp={layout.pp} all leave after the backward. Give bucket_mib a "
        "number, or leave it out."
    )


def _tuning_needs_plain_bytes(case: Combination) -> str | None:
    if not case.options.reduction.tuned or case.formats is None:
        return None
    return (
        "tuning assumes uncompressed gradients; how long "
        f"{case.formats} takes to compute and to send is not known to it. Give bucket_mib a "
        "number, or leave one of them out."
    )


def _replicas_hold_whole_models(case: Combination) -> str | None:
    layout = case.layout
    if case.options.local_steps is None:
        return None
    for axis in ("zero", "tp", "pp"):
        value = getattr(layout, axis)
        if value > (0 if axis == "zero" else 1):
            return (
                f"{axis}={value} spreads a model over ranks that need each other in every step, "
                "but a replica that trains alone holds a whole model on one rank. Leave "
                f"{axis} out, or local_steps."
            )
    return None


def _replicas_are_processes(case: Combination) -> str | None:
    if case.options.local_steps is None or case.options.device_map is None:
        return None
    return "a device map is for one process, which has no replicas to meet. Leave one of them out."


def _replicas_do_not_wait(case: Combination) -> str | None:
    if case.options.local_steps is None or not case.options.sync_batchnorm:
        return None
    return (
        "sync_batchnorm normalises over all ranks' samples in every forward, but replicas that "
        "train alone do not wait for each other. Leave one of them out."
    )


def _rounds_send_no_gradients(case: Combination) -> str | None:
    if not case.is_local_from_the_start or case.formats is None:
        return None
    return (
        "compress is about how gradients are sent, and replicas that train alone from the first "
        "step on (local_steps.start=0) send none. Use local_steps.exchange for the format of what "
        "they send when they synchronise, or begin with some synchronous steps "
        "(local_steps.start), to which compress applies."
    )


def _rounds_sum_no_gradients(case: Combination) -> str | None:
    if not case.is_local_from_the_start or not case.options.reduction.asked:
        return None
    return (
        "reduction is about how gradients are summed, and replicas that train alone from the first "
        "step on (local_steps.start=0) sum none. Leave it out, or begin with some synchronous "
        "steps (local_steps.start), to which it applies."
    )


def _replicas_have_no_average(case: Combination) -> str | None:
    if case.options.local_steps is None or case.options.ema is None:
        return None
    return (
        "replicas that train alone have a model each between two synchronisations, so that there "
        "is no one model to average over the steps. Leave ema out, or local_steps."
    )


_LAYOUT = ("layout",)

RULES = (
    Rule("axis-not-available", _LAYOUT, _axis_not_available),
    Rule("replicas-need-zero", _LAYOUT, _replicas_need_zero),
    Rule(
        "zero-bubble-keeps-parameters",
        ("layout", "pipeline.schedule"),
        _zero_bubble_keeps_parameters,
    ),
    Rule(
        "selective-needs-one-backward",
        ("pipeline.schedule", "checkpoint_activations"),
        _selective_needs_one_backward,
    ),
    Rule("pipeline-keeps-dtypes", ("layout", "sharding.dtype"), _pipeline_keeps_dtypes),
    Rule("offload-needs-zero", ("layout", "sharding.offload"), _offload_needs_zero),
    Rule("pipeline-runs-backward", _LAYOUT, _pipeline_runs_backward),
    Rule("own-loop-has-no-sample", _LAYOUT, _own_loop_has_no_sample),
    Rule("device-map-is-one-process", ("layout", "device_map"), _device_map_is_one_process),
    Rule("replicas-hold-the-whole-model", ("layout", "local_steps"), _replicas_hold_whole_models),
    Rule("replicas-are-processes", ("device_map", "local_steps"), _replicas_are_processes),
    Rule("replicas-do-not-wait", ("sync_batchnorm", "local_steps"), _replicas_do_not_wait),
    Rule("replicas-have-no-average", ("ema", "local_steps"), _replicas_have_no_average),
    Rule("rounds-send-no-gradients", ("compress", "local_steps"), _rounds_send_no_gradients),
    Rule("rounds-sum-no-gradients", ("reduction", "local_steps"), _rounds_sum_no_gradients),
    Rule("matrices-need-whole-gradients", ("layout", "compress"), _matrices_need_whole_gradients),
    Rule("residuals-are-cut-once", ("layout", "compress"), _residuals_are_cut_once),
    Rule("copies-are-summed-by-fsdp", ("layout", "compress"), _copies_are_summed_by_fsdp),
    Rule("sums-need-copies", ("layout", "reduction"), _sums_need_copies),
    Rule("tuning-needs-overlap", ("layout", "reduction.bucket_mib"), _tuning_needs_overlap),
    Rule(
        "tuning-needs-plain-bytes", ("reduction.bucket_mib", "compress"), _tuning_needs_plain_bytes
    ),
)


def broken_rule(case: Combination) -> tuple[Rule, str] | None:
    """The first rule that ``case`` breaks, and the reason; ``None`` if sound."""
    for rule in RULES:
        if (reason := rule.broken(case)) is not None:
            return rule, reason
    return None


def problem_with(case: Combination) -> tuple[str, str] | None:
    """The name of the first rule that ``case`` breaks, and the reason; ``None`` if sound."""
    found = broken_rule(case)
    return None if found is None else (found[0].name, found[1])


def clash(settings: Sequence[str]) -> str:
    """Settings that do not go together, as the beginning of a sentence."""
    first, *others = settings
    return f"{first} does not go with {', '.join(others)}" if others else first


def layout_in_world(options: EngineOptions, world_size: int, *, own_loop: bool = False) -> Layout:
    """The layout that ``options`` ask for in a world of ``world_size`` ranks.

    Raises ``LayoutError`` where it is not sound: first for what no number of ranks would
    mend, then for the number of ranks.
    """
    check_rules(Combination(Layout.smallest(options.layout), options, own_loop))
    layout = Layout.parse(options.layout, world_size=world_size)
    layout.check_world(world_size)
    check_rules(Combination(layout, options, own_loop))
    return layout


def check_rules(case: Combination) -> None:
    """Raise ``LayoutError`` for a case that breaks a rule."""
    if (found := broken_rule(case)) is not None:
        rule, reason = found
        told = clash([case.words(setting) for setting in rule.settings])
        raise LayoutError(f"{told}: {reason} [rule: {rule.name}]")
