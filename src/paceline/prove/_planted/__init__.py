"""Known bugs for ``paceline verify --plant NAME``, so that anybody can see the prover catch them.

Each one replaces a piece of the engine on a layout's ranks while its run lasts. The engine knows
nothing of them, and this package is imported only when a bug is asked for by name. It ships with
the library, and not as an extra or with the tests: the bugs patch the internals of exactly this
version of the engine, and the ranks of a proof have to import them wherever they run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.formatting import one_of
from paceline.prove._planted import data_parallel, model_parallel
from paceline.prove.cases import Case

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Plant:
    """A bug: what it is in words, what it takes to show, and how to introduce it."""

    name: str
    words: str
    patch: Patch
    dp: int = 1
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    """The degrees that it takes."""
    whole: bool = False
    """Whether every data-parallel rank must hold whole gradients (``zero=0``)."""
    unsplit: bool = False
    """Whether ranks must hold whole parameters (``zero=0``, ``tp=1``)."""
    split: bool = False
    """Whether ranks must hold parts of parameters (``zero`` or ``tp``)."""
    parts: bool = False
    """Whether ranks must hold parts of the model (``zero``, ``tp`` or ``pp``)."""
    accumulation: bool = False
    clipping: bool = False
    uneven: bool = False
    """Whether shares of equal size hide it."""
    buffers: bool = False
    ties: bool = False


_NAMES = {
    "dp": "data-parallel ranks",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline ranks",
    "replicas": "replicas of a sharded model",
}


def find_plant(name: str) -> Plant:
    """The bug ``name``; raises ``ConfigError`` where there is none of that name."""
    if name not in PLANTS:
        raise ConfigError(f"plant {name!r} must be {one_of(PLANTS)}")
    return PLANTS[name]


def check_plant(
    plant: Plant, cases: Sequence[Case], *, clip_norm: float | None, global_batch: int
) -> None:
    """Raise ``ConfigError`` where a bug could not show on one of ``cases``."""
    problems = []
    if plant.clipping and clip_norm is None:
        problems.append(f"plant {plant.name!r} needs clipping: set clip_norm (train.clip_norm)")
    for case in cases:
        problems += _problems(plant, case, global_batch)
    if problems:
        raise ConfigError(problems)


def _problems(plant: Plant, case: Case, global_batch: int) -> list[str]:
    """Why ``plant`` could not show on ``case``."""
    layout, told = case.layout, f"layout {str(case)!r}"
    problems = []
    for axis, what in _NAMES.items():
        needed, there = getattr(plant, axis), getattr(layout, axis)
        if there < needed:
            problems.append(
                f"plant {plant.name!r} needs {needed} {what} or more, but {told} has {there}"
            )
    if (plant.whole or plant.unsplit) and layout.zero:
        problems.append(
            f"plant {plant.name!r} needs zero=0, where ranks hold what they need whole, but {told} "
            f"has zero={layout.zero}"
        )
    if plant.unsplit and layout.tp > 1:
        problems.append(
            f"plant {plant.name!r} needs tp=1, where ranks hold whole parameters, but {told} has "
            f"tp={layout.tp}; see 'stale-shard'"
        )
    split = layout.shards > 1 or layout.tp > 1
    if (plant.split and not split) or (plant.parts and not split and layout.pp == 1):
        problems.append(
            f"plant {plant.name!r} needs ranks that hold parts of "
            f"{'parameters (zero, tp)' if plant.split else 'the model (zero, tp, pp)'}, but on "
            f"{told} each rank holds them whole"
        )
    if plant.accumulation and not case.accumulates(global_batch):
        problems.append(
            f"plant {plant.name!r} needs accumulation, but {told} runs each rank's share of "
            f"{global_batch} samples at once; add a microbatch, like '{layout},microbatch=1'"
        )
    return problems


PLANTS = {
    plant.name: plant
    for plant in (
        Plant(
            "missing-all-reduce",
            "each data-parallel rank keeps its own gradient",
            data_parallel.missing_all_reduce,
            dp=2,
            whole=True,
        ),
        Plant(
            "wrong-average",
            "gradients are summed over the data-parallel ranks, not averaged",
            data_parallel.wrong_average,
            dp=2,
        ),
        Plant(
            "unscaled-loss",
            "each rank divides by its own count, not by the global one",
            data_parallel.unscaled_loss,
            dp=2,
            whole=True,
            uneven=True,
        ),
        Plant(
            "wrong-accumulation",
            "gradients are summed over the microbatches, not averaged",
            data_parallel.wrong_accumulation,
            accumulation=True,
        ),
        Plant(
            "skipped-microbatch",
            "the last microbatch of a step is left out",
            data_parallel.skipped_microbatch,
            accumulation=True,
        ),
        Plant(
            "local-clip",
            "each rank clips its own gradient before the average",
            data_parallel.local_clip,
            dp=2,
            whole=True,
            clipping=True,
        ),
        Plant("double-sample", "rank 0 counts its first sample twice", data_parallel.double_sample),
        Plant(
            "stale-parameter",
            "the last rank leaves out the update",
            data_parallel.stale_parameter,
            unsplit=True,
        ),
        Plant(
            "stale-shard",
            "the last rank leaves out the update of the parts that it holds",
            data_parallel.stale_parameter,
            split=True,
        ),
        Plant(
            "stale-buffer",
            "the last rank keeps its old buffers",
            data_parallel.stale_buffer,
            buffers=True,
        ),
        Plant(
            "stale-tied-weight",
            "a tied weight is a copy that nobody updates",
            data_parallel.stale_tied_weight,
            ties=True,
        ),
        Plant(
            "shard-clip",
            "each rank clips by the norm of the part that it holds",
            model_parallel.shard_clip,
            parts=True,
            clipping=True,
        ),
        Plant(
            "wrong-copies",
            "the copies of a sharded model (replicas) do not average their gradients",
            model_parallel.wrong_copies,
            replicas=2,
        ),
        Plant(
            "row-parallel-bias",
            "every tensor-parallel rank adds the bias of a row-parallel layer",
            model_parallel.row_parallel_bias,
            tp=2,
        ),
        Plant(
            "missing-tp-reduce",
            "the gradient of what enters column-parallel layers is not summed over their ranks",
            model_parallel.missing_tp_reduce,
            tp=2,
        ),
        Plant(
            "untied-stages",
            "the gradients of a tied weight on two pipeline stages are not summed",
            model_parallel.untied_stages,
            pp=2,
            ties=True,
        ),
        Plant(
            "pipeline-scale",
            "the pipeline's loss is divided by the number of microbatches once more",
            model_parallel.pipeline_scale,
            pp=2,
        ),
    )
}
"""Every bug that can be planted, by name."""
