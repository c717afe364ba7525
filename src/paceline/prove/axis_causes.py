"""Rules for what goes wrong where a model is sharded, tensor-parallel or a pipeline."""

from __future__ import annotations

import math

from paceline.prove.evidence import DifferenceEvidence, LikelyCause, near


def _stale_part(e: DifferenceEvidence) -> LikelyCause | None:
    if e.differs("gradient") or e.place.kind != "parameter":
        return None
    stale = {
        rank: parts
        for rank, outcome in enumerate(e.outcomes)
        if (parts := outcome.stale_parts.get(e.place.step))
    }
    if not stale:
        return None
    name = next(iter(stale.values()))[0]
    ranks = ", ".join(map(str, stale))
    return LikelyCause(
        "stale-shard",
        f"the gradient is right, but the part of {name} that rank {ranks} holds "
        f"({_kind_of_part(e, name)}) still has its value of the step before: the update does not "
        "reach it",
    )


def _kind_of_part(e: DifferenceEvidence, name: str) -> str:
    layout = e.case.layout
    kinds = ["tensor-parallel"] if any(name in one.split for one in e.outcomes) else []
    kinds += [f"sharded, zero={layout.zero}"] if layout.shards > 1 else []
    return ", ".join(kinds)


def _shard_clip(e: DifferenceEvidence) -> LikelyCause | None:
    if e.differs("gradient") or not e.differs("norm"):
        return None
    norms = e.norms()
    layout = e.case.layout
    if not norms or max(norms) - min(norms) <= 1e-6 * max(norms):
        return None
    axes = [
        name
        for name, used in (
            ("sharded", layout.zero > 0 and layout.shards > 1),
            ("tensor-parallel", layout.tp > 1),
            ("pipeline-parallel", layout.pp > 1),
        )
        if used
    ]
    listed = ", ".join(f"{factor:.3g} on rank {rank}" for rank, factor in enumerate(norms))
    total = math.sqrt(sum(factor**2 for factor in norms) / layout.copies)
    together = " (together they make the right one)" if near(total, 1) else ""
    return LikelyCause(
        "shard-clip",
        f"every gradient is right, but each rank has a norm of its own ({listed} times the right "
        f"one{together}): it is taken over, and clips, the {' and '.join(axes)} part that the rank "
        "holds, and not the whole gradient",
    )


def _copies_differ(e: DifferenceEvidence) -> LikelyCause | None:
    """HSDP: the ranks of one sharded copy agree, and the copies do not."""
    layout = e.case.layout
    if layout.zero == 0 or layout.replicas == 1 or not e.ranks_differ():
        return None
    if e.ranks_differ(same_copy=True):
        return None
    return LikelyCause(
        "wrong-copies",
        f"the {layout.replicas} sharded copies (replicas) have different gradients: each sums "
        "those of its own ranks, and they are not averaged over the copies",
    )


def _tensor_ranks_differ(e: DifferenceEvidence) -> LikelyCause | None:
    if e.case.layout.tp == 1 or not e.ranks_differ(same_data=True):
        return None
    return LikelyCause(
        "missing-tp-reduce",
        f"tensor-parallel ranks have different gradients for {e.place.name}, which each of them "
        "holds whole: the all-reduce over the tensor-parallel ranks is missing, where a whole "
        "value goes into split layers or comes out of them",
    )


def _tied_stages(e: DifferenceEvidence) -> LikelyCause | None:
    if e.case.layout.pp == 1 or e.place.kind != "gradient":
        return None
    for group in e.reference.facts.ties:
        if e.wrong_names("gradient") <= set(group):
            return LikelyCause(
                "untied-stages",
                f"only the gradient of {' and '.join(group)}, one tied weight, is wrong: it lives "
                "on two pipeline stages, and the gradients of its copies are not summed",
            )
    return None


def _bias_on_every_rank(e: DifferenceEvidence) -> LikelyCause | None:
    if not e.bias_on_every_rank:
        return None
    return LikelyCause(
        "row-parallel-bias",
        "the loss is what one process computes with the biases of row-parallel layers times "
        f"{e.case.layout.tp}: each of the {e.case.layout.tp} tensor-parallel ranks adds the bias "
        "before the sum, where it should be added once, after it",
    )


def _backward_of_split_layers(e: DifferenceEvidence) -> LikelyCause | None:
    """The forward is right, some gradients are, and no weighting of the samples explains others."""
    if e.case.layout.tp == 1 or e.place.kind != "gradient" or e.differs("loss"):
        return None
    names = {place.name for place in e.outcomes[e.rank].measures if place.kind == "gradient"}
    if e.wrong_names("gradient") == names:
        return None
    return LikelyCause(
        "missing-tp-reduce",
        "the loss and some gradients are right, and no weighting of the samples explains the "
        "others: the gradient of what goes into split layers, or comes out of them, is not summed "
        "over the tensor-parallel ranks",
    )


EARLY_RULES = (_stale_part, _shard_clip)
"""Where every gradient is right; before the rules for whole parameters and plain numbers."""
AXIS_RULES = (_copies_differ, _bias_on_every_rank, _tensor_ranks_differ, _tied_stages)
LATE_RULES = (_backward_of_split_layers,)
"""Where nothing simpler explains a wrong gradient."""
