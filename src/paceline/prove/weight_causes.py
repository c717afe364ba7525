"""Rules that read the cause from the weights with which samples entered a gradient."""

from __future__ import annotations

from paceline.prove.evidence import NEAR, DifferenceEvidence, LikelyCause, near, uniform

Pieces = list[tuple[tuple[int, int], list[int]]]
"""Each microbatch (data-parallel rank, number there) and the samples it holds."""


def by_weights(e: DifferenceEvidence) -> LikelyCause | None:
    """The cause that the samples' weights show, where they could be found."""
    if e.weights is None:
        return None
    pieces = list(e.case.pieces(e.samples).items())
    weights = e.weights.of
    if factor := uniform(weights):
        return None if near(factor, 1) else one_factor(e, factor)
    # A mean of means over shares of 2 and 1 gives the last sample twice the weight of the others,
    # as counting it twice does: the number of samples tells which it is.
    rules = [_own_share_only, _whole_pieces_missing, _own_scale, _some_twice, _factor_by_rank]
    if e.samples_differ:
        rules.remove(_own_scale)
    for rule in rules:
        if (cause := rule(e, weights, pieces)) is not None:
            return cause
    if all(uniform([weights[i] for i in own]) for _, own in pieces if own):
        return LikelyCause(
            "wrong-accumulation",
            "each microbatch counts with another weight: an average of averages, where the "
            "microbatches should be weighted by what they hold",
        )
    return None


def _own_share_only(
    e: DifferenceEvidence, weights: list[float], pieces: Pieces
) -> LikelyCause | None:
    own = {i for (rank, _), part in pieces if rank == e.data_rank for i in part}
    others = [w for i, w in enumerate(weights) if i not in own]
    if not others or not all(near(w, 0) for w in others) or not e.ranks_differ():
        return None
    return LikelyCause(
        "missing-all-reduce",
        f"the gradient on rank {e.rank} is that of its own samples alone: a missing all-reduce"
        + (" over the data-parallel ranks" if e.case.layout.beyond_dp else ""),
    )


def _whole_pieces_missing(
    e: DifferenceEvidence, weights: list[float], pieces: Pieces
) -> LikelyCause | None:
    gone = [piece for piece, own in pieces if own and all(near(weights[i], 0) for i in own)]
    missing = {i for piece, own in pieces if piece in gone for i in own}
    stray = [i for i, w in enumerate(weights) if near(w, 0) and i not in missing]
    if not gone or stray or not e.case.accumulates(e.samples):
        return None
    rank, number = gone[0]
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    return LikelyCause(
        "skipped-microbatch",
        f"microbatch {number + 1} of {e.reader} {rank}{more} adds nothing to the gradient: a "
        f"skipped {'pipeline ' if e.case.layout.pp > 1 else ''}microbatch",
    )


def _some_twice(e: DifferenceEvidence, weights: list[float], pieces: Pieces) -> LikelyCause | None:
    usual = sorted(weights)[len(weights) // 2]
    if usual <= NEAR:
        return None
    odd = [(i, w / usual) for i, w in enumerate(weights) if not near(w / usual, 1)]
    if 2 * len(odd) >= len(weights):
        return None
    if not all(near(w, round(w)) for _, w in odd):
        return None
    index, times = odd[0]
    more = f" (and {len(odd) - 1} more like it)" if len(odd) > 1 else ""
    if round(times) == 0:
        return LikelyCause(
            "missing-sample",
            f"sample {index} of the global batch adds nothing to the gradient{more}",
        )
    return LikelyCause(
        "double-sample",
        f"sample {index} of the global batch counts {round(times)} times{more}",
    )


def _factors(e: DifferenceEvidence, weights: list[float], pieces: Pieces) -> dict[int, float]:
    """By rank, the one weight that all its samples have; empty where that is not so."""
    own: dict[int, list[float]] = {}
    for (rank, _), part in pieces:
        own.setdefault(rank, []).extend(weights[i] for i in part)
    factors = {rank: uniform(values) for rank, values in own.items() if values}
    known = {rank: factor for rank, factor in factors.items() if factor is not None}
    return known if len(known) == len(factors) > 1 else {}


def _own_scale(e: DifferenceEvidence, weights: list[float], pieces: Pieces) -> LikelyCause | None:
    """Each rank's samples are scaled by what is known to differ from rank to rank."""
    assert e.weights is not None
    factors = _factors(e, weights, pieces)
    if not factors:
        return None
    if _by_microbatches(e, factors):
        return _pipeline_scale(f"each rank's samples count by {_listed(e, factors)}")
    if e.clip_norm is not None and _is_clipping(e, factors):
        return LikelyCause(
            "local-clip",
            f"each rank's part is scaled down by itself ({_listed(e, factors)}), to the clipping "
            f"bound {e.clip_norm:g}: clipped on each rank before the average, not after it",
        )
    items = dict.fromkeys(factors, 0.0)
    for (rank, _), part in pieces:
        items[rank] += sum(e.weights.items[i] for i in part)
    # A mean of means weights each item by one over its own rank's count.
    if not uniform([factor * items[rank] for rank, factor in factors.items()]):
        return None
    return LikelyCause(
        "unscaled-loss",
        f"each rank's samples count by a factor of its own ({_listed(e, factors)}): every rank "
        "averages over its own items, where the mean should run over those of the global batch",
    )


def _factor_by_rank(
    e: DifferenceEvidence, weights: list[float], pieces: Pieces
) -> LikelyCause | None:
    factors = _factors(e, weights, pieces)
    if not factors:
        return None
    return LikelyCause(
        "weights-by-rank",
        f"each rank's samples count by a factor of its own ({_listed(e, factors)}): scaled on each "
        "rank, before the average",
    )


def _listed(e: DifferenceEvidence, factors: dict[int, float]) -> str:
    return ", ".join(f"{factor:.3g} on {e.reader} {rank}" for rank, factor in factors.items())


def _is_clipping(e: DifferenceEvidence, factors: dict[int, float]) -> bool:
    assert e.weights is not None
    assert e.clip_norm is not None
    scaled = 0
    for rank, factor in factors.items():
        norm = e.weights.rank_norms[rank]
        right = min(1.0, e.clip_norm / norm) if norm > 0 else 1.0
        scaled += right < 1 - NEAR
        if not near(factor, right):
            return False
    return scaled > 0


def one_factor(e: DifferenceEvidence, factor: float) -> LikelyCause | None:
    """The whole gradient is off by one factor."""
    dp, size = e.case.layout.dp, e.case.layout.world_size
    words = f"every gradient is off by the factor {factor:.4g}"
    if e.right_without_accumulation:
        return LikelyCause(
            "wrong-accumulation",
            f"{words}, and only when a rank runs several microbatches: their gradients are not "
            "averaged over the accumulation",
        )
    counts = set(e.case.microbatches(e.samples)) if e.case.layout.pp > 1 else set()
    if dp not in counts and _by_microbatches(e, dict.fromkeys(range(dp), factor)):
        return _pipeline_scale(words)
    readers = "data-parallel ranks" + (" (and of the pipeline's microbatches)" * (dp in counts))
    for degree, axis in ((dp, readers), (size, "ranks")):
        if degree > 1 and near(factor, degree):
            return LikelyCause(
                "wrong-average",
                f"{words}, the number of {axis}: a sum over them that should be an average",
            )
        if degree > 1 and near(factor * degree, 1):
            return LikelyCause(
                "averaged-twice",
                f"{words}, one over the number of {axis}: an average that should be a sum",
            )
    return LikelyCause("scaled-gradient", f"{words}: the loss or the gradient is scaled wrongly")


def _by_microbatches(e: DifferenceEvidence, factors: dict[int, float]) -> bool:
    """Whether the factors are the ranks' numbers of pipeline microbatches, or one over them."""
    if e.case.layout.pp == 1:
        return False
    counts = e.case.microbatches(e.samples)
    if max(counts) == 1:
        return False
    return all(near(factor, counts[rank]) for rank, factor in factors.items()) or all(
        near(factor * counts[rank], 1) for rank, factor in factors.items()
    )


def _pipeline_scale(what: str) -> LikelyCause:
    return LikelyCause(
        "pipeline-scale",
        f"{what}, which is the number of the pipeline's microbatches, or one over it: the loss of "
        "each is scaled as if it were the whole batch's, or their sum is divided once more",
    )
