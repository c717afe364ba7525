"""Which of the numbers in a drawn tensor belong to which sample.

Samples are looked for in the first dimension, as everywhere in Paceline; then in any other that is
as long as the microbatch has samples; then, in what was computed from the samples, as the outer
part of a first dimension into which others were folded (tokens, heads, windows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Attribution(NamedTuple):
    """Where a tensor holds its samples: along ``dim``, each with ``group`` entries in a row.

    ``dim`` is None for what is drawn once for all samples of a step.
    """

    dim: int | None
    group: int = 1


WHOLE_BATCH = Attribution(None)


def attribute(
    shape: Sequence[int],
    samples: int | None,
    *,
    computed: bool,
    time_first: bool = False,
    folded: bool = False,
) -> Attribution | None:
    """How to attribute a draw of ``shape`` to ``samples``; None where it cannot be known.

    ``computed``: the shape is that of a value of the model, not one that its code has written
    down. ``time_first``: a module around it says so (``batch_first=False``). ``folded``: heads or
    the like are known to be folded into the first dimension, where that is longer.
    """
    if len(shape) == 0:
        return WHOLE_BATCH  # one number: a layer is dropped, or not, for all samples alike
    if not samples:
        return None
    for dim in (1, 0) if time_first and len(shape) > 1 else (0,):
        if shape[dim] == samples:
            return Attribution(dim)
    if computed:
        others = [dim for dim, size in enumerate(shape) if size == samples]
        fold = Attribution(0, shape[0] // samples) if shape[0] % samples == 0 else None
        between = [dim for dim in others if dim < len(shape) - 1]  # the last one holds features
        if fold is not None and (folded or not between):
            return fold
        if len(between or others) == 1:
            return Attribution((between or others)[0])
    if all(size == 1 for size in shape):
        return WHOLE_BATCH
    return None


def still_fits(found: Attribution, shape: Sequence[int], samples: int | None) -> Attribution | None:
    """What was found for an earlier draw of the same place, if it can be right for this one."""
    if found.dim is None:
        return found if all(size == 1 for size in shape) else None
    if not samples or found.dim >= len(shape) or shape[found.dim] % samples:
        return None
    group = shape[found.dim] // samples
    return Attribution(found.dim, group) if (group > 1) == (found.group > 1) else None
