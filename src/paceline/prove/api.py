"""The entry points: ``verify`` for a script, ``verify_config`` for a config."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.config import Config
from paceline.engine.arguments import OptimizerFactory
from paceline.engine.loss import LossFunction
from paceline.engine.precision import PRECISIONS
from paceline.errors import ConfigError, TrainingError
from paceline.formatting import one_of
from paceline.layout import Layout
from paceline.options import DataOptions
from paceline.prove.cases import Case, parse_cases
from paceline.prove.devices import choose, choose_for
from paceline.prove.prover import Prover, Tell
from paceline.prove.report import VerifyReport
from paceline.prove.subject import Subject, configured, given
from paceline.testing.pool import RankPool

if TYPE_CHECKING:
    from paceline.prove._planted import Plant

CONFIG_BATCH = 32
"""The most samples a step of ``paceline verify`` takes, unless told otherwise."""
_NO_LOCAL_STEPS = (
    "local_steps were off: replicas that train alone differ from one process by design; the proof "
    "is of steps that they take together"
)
_NO_COMPILE = "compile was off: in float64 the proof runs the model as it is"
_NO_SHARD_DTYPE = "sharded parameters were not cast to {}: the proof computes in float64"


def verify(
    model: nn.Module | Callable[[], nn.Module],
    *,
    optimizer: Optimizer | OptimizerFactory,
    data: Any,
    layouts: Sequence[str | Layout | Case] | str,
    loss: LossFunction | None = None,
    steps: int = 3,
    global_batch: int | None = None,
    seed: int = 0,
    plant: str | None = None,
    device: str = "auto",
    share_gpu: bool = False,
    data_options: DataOptions = DataOptions(),
    timeout: float = 300.0,
    progress: bool = True,
    pool: RankPool | None = None,
    **options: Any,
) -> VerifyReport:
    """Prove that ``layouts`` compute what one process computes, for this model and data.

    Runs ``steps`` optimizer steps on one process and on local ranks for each layout, over the
    same samples, and compares every loss, gradient, norm, parameter and buffer. Nothing passed in
    is changed: the runs work on copies.

    Args:
        model: as for ``paceline.Trainer``, or a function that makes one.
        optimizer: as for ``paceline.Trainer``; a function where the model is one.
        data: as the training data of ``paceline.Trainer``.
        layouts: such as ``["dp=2", "dp=2,zero=3,microbatch=4", "pp=2,schedule=zbv"]``.
        loss: as for ``paceline.Trainer``.
        global_batch: samples per step; not needed where the data is a torch ``DataLoader``.
        plant: a known bug to introduce into the layouts' runs (``paceline verify --list-plants``).
        device: ``cpu``, ``cuda`` or ``auto``: what a run here would use, GPUs where there is one
            for each rank, else the CPU.
        share_gpu: let more ranks than there are GPUs share them, over NCCL.
        timeout: seconds one run may take.
        progress: show on a terminal what is running.
        pool: live ranks to use, for several proofs in a row; else it brings up its own.
        options: those of ``paceline.Engine``: ``microbatch``, ``clip_norm``, …. ``precision``
            is ``fp64`` unless given, which tells rounding from bugs best; in another, a difference
            is judged against what one process shows when its samples come in another order and
            cut, and ``compile`` is as given.
    """
    if "layout" in options:
        raise TrainingError("verify(layout=…): name the layouts to verify in layouts=[…].")
    batch = _batch_of(data, global_batch)
    _check_numbers(steps=steps, global_batch=batch)
    precision = options.get("precision", "fp64")
    if precision not in PRECISIONS:
        raise TrainingError(f"precision={precision!r} must be {one_of(PRECISIONS)}.")
    if (microbatch := options.get("microbatch")) is not None:
        _check_numbers(microbatch=microbatch)
    cases = parse_cases(
        layouts, microbatch=microbatch, global_batch=batch, pipeline=options.get("pipeline")
    )
    clip_norm = options.get("clip_norm")
    bug = _find_plant(plant, cases, clip_norm, batch)
    place = choose(device, cases, share_gpu=share_gpu)
    notes = [] if place.note is None else [place.note]
    if options.get("compile") and precision == "fp64":
        notes.append(_NO_COMPILE)
    if options.get("local_steps") is not None:
        options["local_steps"] = None
        notes.append(_NO_LOCAL_STEPS)
    payload = given(model, optimizer, loss, data, data_options, options)
    sharding = options.get("sharding")
    if precision == "fp64" and sharding is not None and sharding.dtype is not None:
        notes.append(_NO_SHARD_DTYPE.format(sharding.dtype))
    with _telling(progress) as tell:
        prover = Prover(
            Subject(payload, global_batch, seed, steps, precision),
            clip_norm=clip_norm,
            sync_batchnorm=bool(options.get("sync_batchnorm")),
            plant=bug,
            timeout=timeout,
            tell=tell,
            pool=pool,
            place=place,
        )
        return prover.prove(cases, notes)


def verify_config(
    config: Config,
    layouts: Sequence[str],
    *,
    steps: int = 3,
    global_batch: int | None = None,
    precision: str = "fp64",
    plant: str | None = None,
    device: str = "auto",
    share_gpu: bool = False,
    timeout: float = 300.0,
    progress: bool = True,
) -> VerifyReport:
    """``verify`` for what a config describes; ``precision="run"`` is the config's own.

    ``device="auto"`` is where the config's run would train.
    """
    config = config.model_copy(update={"layout": "auto"})  # the proof's own are proved
    notes = []
    own = config.batch.global_batch
    batch = min(own, CONFIG_BATCH) if global_batch is None else global_batch
    _check_numbers(steps=steps, global_batch=batch)
    if global_batch is None and _needs_uneven_shares(plant):
        batch = max(batch - 1, 1)  # shares of equal size would hide it
    if batch != own:
        notes.append(f"steps of {batch} samples, not the config's {own} (--global-batch)")
    if precision not in ("fp64", "run"):
        raise ConfigError(f"--precision {precision}: must be fp64, or run for the config's own")
    if config.compile and precision == "fp64":
        notes.append(_NO_COMPILE)
    if config.local_steps.every is not None:
        notes.append(_NO_LOCAL_STEPS)
    if precision == "fp64" and config.sharding.dtype is not None:
        notes.append(_NO_SHARD_DTYPE.format(config.sharding.dtype))
    cases = parse_cases(
        layouts,
        microbatch=config.batch.microbatch,
        global_batch=batch,
        pipeline=config.pipeline.options(),
    )
    place = choose_for(config, device, cases, share_gpu=share_gpu)
    notes += [] if place.note is None else [place.note]
    clip_norm = config.train.clip_norm
    bug = _find_plant(plant, cases, clip_norm, batch)
    exact = precision == "fp64"
    with _telling(progress) as tell:
        prover = Prover(
            Subject(
                configured(config), batch, config.seed, steps, "fp64" if exact else config.precision
            ),
            clip_norm=clip_norm,
            sync_batchnorm=config.train.sync_batchnorm,
            plant=bug,
            timeout=timeout,
            tell=tell,
            place=place,
        )
        return prover.prove(cases, notes)


def _find_plant(
    name: str | None, cases: Sequence[Case], clip_norm: float | None, global_batch: int
) -> Plant | None:
    """The bug to introduce; raises ``ConfigError`` where it could not show."""
    if name is None:
        return None
    from paceline.prove._planted import check_plant, find_plant

    plant = find_plant(name)
    check_plant(plant, cases, clip_norm=clip_norm, global_batch=global_batch)
    return plant


def _needs_uneven_shares(plant: str | None) -> bool:
    if plant is None:
        return False
    from paceline.prove._planted import PLANTS

    return plant in PLANTS and PLANTS[plant].uneven


def _batch_of(data: Any, global_batch: int | None) -> int:
    if global_batch is None and isinstance(data, DataLoader) and data.batch_size:
        return data.batch_size
    if global_batch is None:
        raise TrainingError(
            "verify(): pass global_batch=, the samples per optimizer step over all ranks."
        )
    return global_batch


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TrainingError(f"{name}={value!r} must be a whole number, 1 or more.")


@contextlib.contextmanager
def _telling(progress: bool) -> Iterator[Tell]:
    """A line on a terminal that says what is running; nothing elsewhere."""
    from paceline.track.console import SafeConsole

    console = SafeConsole(stderr=True)
    if not progress or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(f"verifying: {text}")
