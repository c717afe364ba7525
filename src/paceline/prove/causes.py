"""From what differs to the likely cause, in words.

Every rule looks at the evidence and says what it makes of it, or nothing; the first that speaks is
believed. The rules stand from the particular to the general.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.prove.axis_causes import AXIS_RULES, EARLY_RULES, LATE_RULES
from paceline.prove.evidence import NEAR, DifferenceEvidence, LikelyCause, near
from paceline.prove.weight_causes import by_weights, one_factor


def likely_cause(evidence: DifferenceEvidence) -> LikelyCause:
    """The most particular cause that explains the evidence."""
    for rule in _RULES:
        cause = rule(evidence)
        if cause is not None:
            return cause
    return LikelyCause(
        "unknown",
        "no known pattern: the values are neither stale, nor zero, nor off by one factor",
    )


def _another_start(e: DifferenceEvidence) -> LikelyCause | None:
    if e.place.step > 0:
        return None
    return LikelyCause(
        "another-start",
        f"the {e.place.kind} differs before the first step{e.who}: building the model does not "
        "give the same values every time (it draws from something that torch.manual_seed does not "
        "seed), or they changed when the model was spread",
    )


def _plain_batch_norm(e: DifferenceEvidence) -> LikelyCause | None:
    if e.sync_batchnorm or not e.reference.facts.live_norms or e.case.layout.dp == 1:
        return None
    names = ", ".join(e.reference.facts.live_norms[:3])
    return LikelyCause(
        "plain-batch-norm",
        f"BatchNorm without sync ({names}): each rank normalises over its own samples, so no "
        "data-parallel layout computes what one process computes. Set sync_batchnorm "
        "(train.sync_batchnorm: true)",
    )


def _randomness(e: DifferenceEvidence) -> LikelyCause | None:
    if not e.reference.facts.draws:
        return None
    return LikelyCause(
        "random-forward",
        f"the forward pass draws random numbers from each rank's own stream{_drawn_by(e)}: two "
        "runs cannot be compared. Draw tensors whose first dimension is the batch, or switch that "
        "randomness off for the proof",
    )


def _drawn_by(e: DifferenceEvidence) -> str:
    modules = e.reference.facts.own_stream
    return f" (in {', '.join(modules[:3])})" if modules else ""


def _samples_interact(e: DifferenceEvidence) -> LikelyCause | None:
    if not e.reference.interacts:
        return None
    return LikelyCause(
        "samples-interact",
        "on one process, too, the result depends on how the batch is ordered and cut (it changes "
        f"by {e.reference.interacts:.1e}): the loss is not a mean over samples, or samples meet "
        "in the forward pass (in-batch negatives, a norm over the batch). Return (sum, count) "
        "from the loss if its mean runs over something other than samples",
    )


def _broken_tie(e: DifferenceEvidence) -> LikelyCause | None:
    for rank, outcome in enumerate(e.outcomes):
        for group in e.reference.facts.ties:
            here = [name for name in group if name not in outcome.missing]
            if len(here) > 1 and not any(set(here) <= set(own) for own in outcome.facts.ties):
                return LikelyCause(
                    "stale-tied-weight",
                    f"{' and '.join(here)} are one tied weight on one process, but separate "
                    f"tensors on rank {rank}: one of them misses gradients and updates",
                )
    return None


def _stale(e: DifferenceEvidence) -> LikelyCause | None:
    if e.differs("gradient") or not e.measure.stale:
        return None
    if e.place.kind == "buffer":
        return LikelyCause(
            "stale-buffer",
            f"the buffer still has its value of the step before{e.who}: it is not updated, or not "
            "sent to the other ranks",
        )
    if e.place.kind == "parameter":
        return LikelyCause(
            "stale-parameter",
            f"the gradient is right, but the parameter still has its value of the step before"
            f"{e.who}: the update is not applied",
        )
    return None


def _own_buffer(e: DifferenceEvidence) -> LikelyCause | None:
    if e.place.kind != "buffer" or e.differs("gradient"):
        return None
    return LikelyCause(
        "local-buffer",
        f"gradients and parameters are right, but the buffer differs{e.who}: it is computed from "
        "each rank's own samples, or counts each rank's forwards",
    )


def _update(e: DifferenceEvidence) -> LikelyCause | None:
    if e.differs("gradient") or e.differs("loss") or e.place.kind != "parameter":
        return None
    if e.differs("norm"):
        return LikelyCause(
            "wrong-norm",
            "every gradient is right, but their norm is not, and so the parameter after clipping: "
            "the norm is taken over a part of the gradients, or over some twice",
        )
    return LikelyCause(
        "update",
        "gradient and norm are right, but the parameter differs after the update: the optimizer "
        "or the clipping differs",
    )


def _only_a_number(e: DifferenceEvidence) -> LikelyCause | None:
    if e.place.kind == "loss":
        return LikelyCause(
            "reported-loss",
            "every tensor is right, but the loss that is reported is not: it is averaged wrongly "
            "over ranks or microbatches",
        )
    if e.place.kind == "norm":
        return LikelyCause(
            "wrong-norm",
            "every tensor is right, but the norm is not: it is taken over a part of the "
            "gradients, or over some twice",
        )
    return None


def _by_factor(e: DifferenceEvidence) -> LikelyCause | None:
    """Without weights by sample: one factor for the first tensor, or ranks that disagree."""
    if e.place.kind != "gradient":
        return None
    if e.ranks_differ():
        return LikelyCause(
            "missing-all-reduce",
            "the ranks have different gradients: each keeps its own, a missing all-reduce",
        )
    if e.measure.zero:
        return LikelyCause("zero-gradient", "the gradient is zero where the reference has one")
    if e.measure.off_factor <= NEAR and not near(e.measure.factor, 1):
        return one_factor(e, e.measure.factor)
    return None


def _accumulation(e: DifferenceEvidence) -> LikelyCause | None:
    if not e.right_without_accumulation:
        return None
    return LikelyCause(
        "accumulation",
        "it differs only when a rank runs several microbatches: look at how they are cut, "
        "weighted and added up",
    )


def _forward(e: DifferenceEvidence) -> LikelyCause | None:
    if not e.differs("loss") or e.place.kind != "gradient":
        return None
    return LikelyCause(
        "forward",
        "the loss differs too, and no weighting of the samples explains the gradient: the "
        "forward pass computes something else",
    )


_RULES: tuple[Callable[[DifferenceEvidence], LikelyCause | None], ...] = (
    _another_start,
    _plain_batch_norm,
    _randomness,
    _broken_tie,
    *EARLY_RULES,
    _stale,
    _samples_interact,
    _own_buffer,
    _only_a_number,
    *AXIS_RULES,
    _update,
    by_weights,
    _by_factor,
    *LATE_RULES,
    _accumulation,
    _forward,
)
