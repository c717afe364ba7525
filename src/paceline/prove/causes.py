"""From what differs to the likely cause, in words.

Every rule looks at the evidence and says what it makes of it, or nothing; the first that speaks is
believed. The rules stand from the particular to the general.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.prove.cases import Case
from paceline.prove.jobs import Outcome, Reference
from paceline.prove.measure import Measure, Place
from paceline.prove.weights import Weights

_NEAR = 1e-3


@dataclass(frozen=True)
class Cause:
    """``name`` is that of the plant which is this bug, where there is one."""

    name: str
    words: str


@dataclass(frozen=True)
class Evidence:
    """Everything known about a layout that differs."""

    case: Case
    samples: int
    clip_norm: float | None
    sync_batchnorm: bool
    reference: Reference
    outcomes: Sequence[Outcome]
    place: Place
    rank: int
    measure: Measure
    """Of the first tensor that differs."""
    loss_differs: bool
    gradients_differ: bool
    norm_differs: bool
    samples_differ: bool
    """Whether the layout says that it saw another number of samples."""
    ranks_differ: bool
    """Whether the ranks' gradients differ among themselves."""
    weights: Weights | None = None
    right_without_accumulation: bool | None = None

    @property
    def who(self) -> str:
        """The rank that differs, where there are several."""
        return f" on rank {self.rank}" if len(self.outcomes) > 1 else ""


def likely_cause(evidence: Evidence) -> Cause:
    """The most particular cause that explains the evidence."""
    for rule in _RULES:
        cause = rule(evidence)
        if cause is not None:
            return cause
    return Cause(
        "unknown",
        "no known pattern: the values are neither stale, nor zero, nor off by one factor",
    )


def _plain_batch_norm(e: Evidence) -> Cause | None:
    if e.sync_batchnorm or not e.reference.facts.live_norms:
        return None
    names = ", ".join(e.reference.facts.live_norms[:3])
    return Cause(
        "plain-batch-norm",
        f"BatchNorm without sync ({names}): each rank normalises over its own samples, so no "
        "data-parallel layout computes what one process computes. Set sync_batchnorm "
        "(train.sync_batchnorm: true)",
    )


def _randomness(e: Evidence) -> Cause | None:
    if not e.reference.facts.draws:
        return None
    return Cause(
        "random-forward",
        "the forward pass draws random numbers that are not dropout's, and each rank draws its "
        "own: two runs cannot be compared. Switch that randomness off for the proof",
    )


def _samples_interact(e: Evidence) -> Cause | None:
    if not e.reference.interacts:
        return None
    return Cause(
        "samples-interact",
        "on one process, too, the result depends on how the batch is ordered and cut (it changes "
        f"by {e.reference.interacts:.1e}): the loss is not a mean over samples, or samples meet "
        "in the forward pass (in-batch negatives, a norm over the batch). Return (sum, count) "
        "from the loss if its mean runs over something other than samples",
    )


def _broken_tie(e: Evidence) -> Cause | None:
    for rank, outcome in enumerate(e.outcomes):
        for group in e.reference.facts.ties:
            here = [name for name in group if name not in outcome.missing]
            if len(here) > 1 and not any(set(here) <= set(own) for own in outcome.facts.ties):
                return Cause(
                    "stale-tied-weight",
                    f"{' and '.join(here)} are one tied weight on one process, but separate "
                    f"tensors on rank {rank}: one of them misses gradients and updates",
                )
    return None


def _stale(e: Evidence) -> Cause | None:
    if e.gradients_differ or not e.measure.stale:
        return None
    if e.place.kind == "buffer":
        return Cause(
            "stale-buffer",
            f"the buffer still has its value of the step before{e.who}: it is not updated, or not "
            "sent to the other ranks",
        )
    if e.place.kind == "parameter":
        return Cause(
            "stale-parameter",
            f"the gradient is right, but the parameter still has its value of the step before"
            f"{e.who}: the update is not applied",
        )
    return None


def _own_buffer(e: Evidence) -> Cause | None:
    if e.place.kind != "buffer" or e.gradients_differ:
        return None
    return Cause(
        "local-buffer",
        f"gradients and parameters are right, but the buffer differs{e.who}: it is computed from "
        "each rank's own samples, or counts each rank's forwards",
    )


def _update(e: Evidence) -> Cause | None:
    if e.gradients_differ or e.loss_differs or e.place.kind != "parameter":
        return None
    if e.norm_differs:
        return Cause(
            "wrong-norm",
            "every gradient is right, but their norm is not, and so the parameter after clipping: "
            "the norm is taken over a part of the gradients, or over some twice",
        )
    return Cause(
        "update",
        "gradient and norm are right, but the parameter differs after the update: the optimizer "
        "or the clipping differs",
    )


def _only_a_number(e: Evidence) -> Cause | None:
    if e.place.kind == "loss":
        return Cause(
            "reported-loss",
            "every tensor is right, but the loss that is reported is not: it is averaged wrongly "
            "over ranks or microbatches",
        )
    if e.place.kind == "norm":
        return Cause(
            "wrong-norm",
            "every tensor is right, but the norm is not: it is taken over a part of the "
            "gradients, or over some twice",
        )
    return None


def _by_weights(e: Evidence) -> Cause | None:
    if e.weights is None:
        return None
    pieces = list(e.case.pieces(e.samples).items())
    weights = e.weights.of
    if uniform := _uniform(weights):
        return None if _near(uniform, 1) else _one_factor(e, uniform)
    # A mean of means over shares of 2 and 1 gives the last sample twice the weight of the others,
    # as counting it twice does: the number of samples tells which it is.
    rules = [_own_share_only, _whole_pieces_missing, _own_scale, _some_twice, _factor_by_rank]
    if e.samples_differ:
        rules.remove(_own_scale)
    for rule in rules:
        if (cause := rule(e, weights, pieces)) is not None:
            return cause
    if all(_uniform([weights[i] for i in own]) for _, own in pieces if own):
        return Cause(
            "wrong-accumulation",
            "each microbatch counts with another weight: an average of averages, where the "
            "microbatches should be weighted by what they hold",
        )
    return None


Pieces = list[tuple[tuple[int, int], list[int]]]


def _own_share_only(e: Evidence, weights: list[float], pieces: Pieces) -> Cause | None:
    own = {i for (rank, _), part in pieces if rank == e.rank for i in part}
    others = [w for i, w in enumerate(weights) if i not in own]
    if not others or not all(_near(w, 0) for w in others) or not e.ranks_differ:
        return None
    return Cause(
        "missing-all-reduce",
        f"the gradient on rank {e.rank} is that of its own samples alone: a missing all-reduce",
    )


def _whole_pieces_missing(e: Evidence, weights: list[float], pieces: Pieces) -> Cause | None:
    gone = [piece for piece, own in pieces if own and all(_near(weights[i], 0) for i in own)]
    missing = {i for piece, own in pieces if piece in gone for i in own}
    stray = [i for i, w in enumerate(weights) if _near(w, 0) and i not in missing]
    if not gone or stray or not e.case.accumulates(e.samples):
        return None
    rank, number = gone[0]
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    return Cause(
        "skipped-microbatch",
        f"microbatch {number + 1} of rank {rank}{more} adds nothing to the gradient: a skipped "
        "microbatch",
    )


def _some_twice(e: Evidence, weights: list[float], pieces: Pieces) -> Cause | None:
    usual = sorted(weights)[len(weights) // 2]
    if usual <= _NEAR:
        return None
    odd = [(i, w / usual) for i, w in enumerate(weights) if not _near(w / usual, 1)]
    if 2 * len(odd) >= len(weights):
        return None
    if not all(_near(w, round(w)) for _, w in odd):
        return None
    index, times = odd[0]
    more = f" (and {len(odd) - 1} more like it)" if len(odd) > 1 else ""
    if round(times) == 0:
        return Cause(
            "missing-sample",
            f"sample {index} of the global batch adds nothing to the gradient{more}",
        )
    return Cause(
        "double-sample",
        f"sample {index} of the global batch counts {round(times)} times{more}",
    )


def _factors(e: Evidence, weights: list[float], pieces: Pieces) -> dict[int, float]:
    """By rank, the one weight that all its samples have; empty where that is not so."""
    own: dict[int, list[float]] = {}
    for (rank, _), part in pieces:
        own.setdefault(rank, []).extend(weights[i] for i in part)
    factors = {rank: _uniform(values) for rank, values in own.items() if values}
    known = {rank: factor for rank, factor in factors.items() if factor is not None}
    return known if len(known) == len(factors) > 1 else {}


def _own_scale(e: Evidence, weights: list[float], pieces: Pieces) -> Cause | None:
    """Each rank's samples are scaled by what is known to differ from rank to rank."""
    assert e.weights is not None
    factors = _factors(e, weights, pieces)
    if not factors:
        return None
    if e.clip_norm is not None and _is_clipping(e, factors):
        return Cause(
            "local-clip",
            f"each rank's part is scaled down by itself ({_listed(factors)}), to the clipping "
            f"bound {e.clip_norm:g}: clipped on each rank before the average, not after it",
        )
    items = dict.fromkeys(factors, 0.0)
    for (rank, _), part in pieces:
        items[rank] += sum(e.weights.items[i] for i in part)
    # A mean of means weights each item by one over its own rank's count.
    if not _uniform([factor * items[rank] for rank, factor in factors.items()]):
        return None
    return Cause(
        "unscaled-loss",
        f"each rank's samples count by a factor of its own ({_listed(factors)}): every rank "
        "averages over its own items, where the mean should run over those of the global batch",
    )


def _factor_by_rank(e: Evidence, weights: list[float], pieces: Pieces) -> Cause | None:
    factors = _factors(e, weights, pieces)
    if not factors:
        return None
    return Cause(
        "weights-by-rank",
        f"each rank's samples count by a factor of its own ({_listed(factors)}): scaled on each "
        "rank, before the average",
    )


def _listed(factors: dict[int, float]) -> str:
    return ", ".join(f"{factor:.3g} on rank {rank}" for rank, factor in factors.items())


def _is_clipping(e: Evidence, factors: dict[int, float]) -> bool:
    assert e.weights is not None
    assert e.clip_norm is not None
    scaled = 0
    for rank, factor in factors.items():
        norm = e.weights.rank_norms[rank]
        right = min(1.0, e.clip_norm / norm) if norm > 0 else 1.0
        scaled += right < 1 - _NEAR
        if not _near(factor, right):
            return False
    return scaled > 0


def _one_factor(e: Evidence, factor: float) -> Cause | None:
    """The whole gradient is off by one factor."""
    dp, size = e.case.layout.dp, e.case.layout.world_size
    words = f"every gradient is off by the factor {factor:.4g}"
    if e.right_without_accumulation:
        return Cause(
            "wrong-accumulation",
            f"{words}, and only when a rank runs several microbatches: their gradients are not "
            "averaged over the accumulation",
        )
    for degree, axis in ((dp, "data-parallel ranks"), (size, "ranks")):
        if degree > 1 and _near(factor, degree):
            return Cause(
                "wrong-average",
                f"{words}, the number of {axis}: a sum over them that should be an average",
            )
        if degree > 1 and _near(factor * degree, 1):
            return Cause(
                "averaged-twice",
                f"{words}, one over the number of {axis}: an average that should be a sum",
            )
    return Cause("scaled-gradient", f"{words}: the loss or the gradient is scaled wrongly")


def _by_factor(e: Evidence) -> Cause | None:
    """Without weights by sample: one factor for the first tensor, or ranks that disagree."""
    if e.place.kind != "gradient":
        return None
    if e.ranks_differ:
        return Cause(
            "missing-all-reduce",
            "the ranks have different gradients: each keeps its own, a missing all-reduce",
        )
    if e.measure.zero:
        return Cause("zero-gradient", "the gradient is zero where the reference has one")
    if e.measure.off_factor <= _NEAR and not _near(e.measure.factor, 1):
        return _one_factor(e, e.measure.factor)
    return None


def _accumulation(e: Evidence) -> Cause | None:
    if not e.right_without_accumulation:
        return None
    return Cause(
        "accumulation",
        "it differs only when a rank runs several microbatches: look at how they are cut, "
        "weighted and added up",
    )


def _forward(e: Evidence) -> Cause | None:
    if not e.loss_differs or e.place.kind != "gradient":
        return None
    return Cause(
        "forward",
        "the loss differs too, and no weighting of the samples explains the gradient: the "
        "forward pass computes something else",
    )


_RULES: tuple[Callable[[Evidence], Cause | None], ...] = (
    _plain_batch_norm,
    _randomness,
    _broken_tie,
    _stale,
    _samples_interact,
    _own_buffer,
    _only_a_number,
    _update,
    _by_weights,
    _by_factor,
    _accumulation,
    _forward,
)


def _near(value: float, target: float) -> bool:
    return abs(value - target) <= _NEAR * max(1.0, abs(target))


def _uniform(values: Sequence[float]) -> float | None:
    """The common value of ``values``; ``None`` where they differ or it is zero."""
    mean = sum(values) / len(values)
    if _near(mean, 0) or not all(_near(value / mean, 1) for value in values):
        return None
    return mean
