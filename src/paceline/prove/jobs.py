"""What the ranks run: the reference on one process, and a layout on several."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.layout import Layout
from paceline.parallel.dtensor import cuts, local, part_of
from paceline.prove.cases import Case
from paceline.prove.comparison import (
    MOST_ROUNDING,
    MOST_ROUNDING_IN_FLOAT32,
    Held,
    Measure,
    RunComparison,
    ValueKey,
    Values,
    far_apart,
    is_stale,
    sketch,
)
from paceline.prove.observed_run import ModelFacts, ObservedRun
from paceline.prove.samples import SampleCut, shuffled
from paceline.prove.subject import Subject
from paceline.world import World

if TYPE_CHECKING:
    from paceline.prove._planted import Plant

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALONE = Case(Layout())


@dataclass
class Reference:
    """What the run on one process showed."""

    facts: ModelFacts
    noise: dict[ValueKey, float] = field(default_factory=dict)
    changing_buffers: list[str] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    """Samples in the global batch of each step."""
    unsettled: dict[str, int] = field(default_factory=dict)
    """By parameter: elements whose gradient is nothing but rounding."""
    interacts: float = 0.0
    """How much another order and cut changes the loss or a gradient, where it is no rounding."""
    uncut: str | None = None
    """Why the batches could not be ordered and cut otherwise."""


@dataclass
class RankOutcome:
    """What one rank of a layout computed, beside the reference."""

    measures: dict[ValueKey, Measure]
    missing: list[str]
    """Parameters of the reference that this rank does not have."""
    facts: ModelFacts
    sketches: dict[int, Tensor]
    """By step: a sample of the gradient's elements, for those that are off."""
    samples: list[int] = field(default_factory=list)
    """By step: how many samples the global batch had, by this rank's account."""
    stale_parts: dict[int, list[str]] = field(default_factory=dict)
    """By step: parameters of which this rank holds a part that the update did not reach."""
    told: list[str] = field(default_factory=list)
    """What the engine had to tell the user, such as what tensor parallelism leaves whole."""
    split: dict[str, int] = field(default_factory=dict)
    """Parameters that tensor parallelism splits, each with the dimension it is split along."""


def run_reference(
    subject: Subject, folder: Path, forwards_of: Case | None, reorder: bool, device: str
) -> Reference:
    """Run on this process alone, on ``device``, leaving what each step computed in ``folder``.

    ``forwards_of``: cut each batch into the forwards of that case, for models in which the samples
    of a forward meet; else the batch goes through whole. ``reorder``: also run with the samples in
    another order and cut, and tell what that changes.
    """
    world = _alone(device)
    cut = None if forwards_of is None else forwards_of.forwards
    run = ObservedRun(subject, _ALONE, world=world, alone=True, cut=cut)
    initial = run.state()
    _leave_trace(run, folder)
    reference = Reference(run.facts, batch=run.samples)
    last = run.state()["buffer"]
    reference.changing_buffers = [
        name for name, value in initial["buffer"].items() if not torch.equal(value, last[name])
    ]
    if reorder:
        _reorder(subject, folder, reference, world)
    return reference


def _leave_trace(run: ObservedRun, folder: Path) -> None:
    torch.save(run.state(), folder / "0.pt")
    for step, values in run.run():
        torch.save(values, folder / f"{step}.pt")


def _permuted(samples: int) -> list[list[int]]:
    return [shuffled(samples, 1)]


def _cut_otherwise(samples: int) -> list[list[int]]:
    order = shuffled(samples, 2)
    size = max(1, -(-samples // 3))
    return [order[i : i + size] for i in range(0, samples, size)]


def _reorder(subject: Subject, folder: Path, reference: Reference, world: World) -> None:
    """Fill in the noise: what other orders and cuts of the same samples change.

    Rounding is told from samples that meet in float64, where nothing else is that large; in
    float32 where the model has no other.
    """
    has_double = subject.runs_in_float64
    exact, exact_folder = replace(subject, precision="fp64" if has_double else "fp32"), folder
    most = MOST_ROUNDING if has_double else MOST_ROUNDING_IN_FLOAT32
    if subject.precision != exact.precision:
        exact_folder = folder / "exact"
        exact_folder.mkdir()
        _leave_trace(ObservedRun(exact, _ALONE, world=world, alone=True), exact_folder)
    cuts: list[SampleCut] = [_permuted]
    if not reference.facts.live_norms:  # their statistics are those of a forward
        cuts.append(_cut_otherwise)
    for cut in cuts:
        try:
            found, unsettled = _noise_of(exact, cut, exact_folder, world)
            worst = max(v for p, v in found.items() if p.kind in ("loss", "gradient"))
            if worst > most:
                reference.interacts = max(reference.interacts, worst)
                continue
            if subject.precision != exact.precision:
                found, unsettled = _noise_of(subject, cut, folder, world)
        except Exception as error:  # the user's model or data; the layouts may do without
            reference.uncut = f"{type(error).__name__}: {error}"
            continue
        reference.unsettled |= unsettled
        for place, value in found.items():
            reference.noise[place] = max(value, reference.noise.get(place, 0.0))


def _noise_of(
    subject: Subject, cut: SampleCut, folder: Path, world: World
) -> tuple[dict[ValueKey, float], dict[str, int]]:
    """How far a run with batches cut so is from the one in ``folder``; unsettled elements."""
    run = ObservedRun(subject, _ALONE, world=world, alone=True, cut=cut)
    comparison = RunComparison(subject.precision)
    found = {}
    for step, values in run.run():
        reference = load(folder, step)
        for (kind, name), one in comparison.measure(values, reference, None).items():
            # Counters of forwards count cuts: only an uncut batch can tell about buffers.
            if kind != "buffer" or cut is _permuted:
                found[ValueKey(step, kind, name)] = one.difference
        comparison.settle(run.engine.spread.held, reference)
    return found, comparison.unsettled


def run_layout(
    subject: Subject, case: Case, folder: Path, plant: Plant | None, floor: float
) -> RankOutcome:
    """Run this rank's part of a layout and compare each step with the reference in ``folder``."""
    world = World.current()
    with contextlib.nullcontext() if plant is None else plant.patch():
        run = ObservedRun(subject, case, world=world)
        outcome = RankOutcome({}, [], run.facts, {})
        comparison = RunComparison(subject.precision)
        before = load(folder, 0)
        for (kind, name), one in far_apart(run.state(), before, floor).items():
            outcome.measures[ValueKey(0, kind, name)] = one
        for step, values in run.run():
            reference = load(folder, step)
            for (kind, name), one in comparison.measure(values, reference, before).items():
                outcome.measures[ValueKey(step, kind, name)] = one
            if any(
                one.difference > floor
                for place, one in outcome.measures.items()
                if place.step == step and place.kind == "gradient"
            ):
                outcome.sketches[step] = sketch(_in_order(values, reference))
            held = run.engine.spread.held
            outcome.stale_parts[step] = _stale_parts(outcome, step, floor, held, reference, before)
            comparison.settle(held, reference)
            before = reference
    outcome.split = {name: cuts(own[0])["tp"] for name, own in held.items() if "tp" in cuts(own[0])}
    outcome.samples = run.samples
    outcome.told = run.engine.take_notes()
    outcome.missing = [name for name in reference["parameter"] if name not in values["parameter"]]
    return outcome


def _stale_parts(
    outcome: RankOutcome, step: int, floor: float, held: Held, reference: Values, before: Values
) -> list[str]:
    """Of the parameters that differ after ``step``: those whose part here has not moved."""
    found = []
    for place, one in outcome.measures.items():
        if place.step != step or place.kind != "parameter" or one.difference <= floor:
            continue
        for parameter in held.get(place.name, ()):
            right, old = (
                part_of(values["parameter"][place.name], parameter)
                for values in (reference, before)
            )
            own = local(parameter).cpu()
            if cuts(parameter) and own.numel() and is_stale(own, right, old):
                found.append(place.name)
                break
    return found


def _in_order(values: Values, reference: Values) -> dict[str, Tensor]:
    """The gradients under the names, and in the order, of the reference; zero where absent."""
    own = values["gradient"]
    return {
        name: own[name] if name in own else torch.zeros_like(tensor)
        for name, tensor in reference["gradient"].items()
    }


def load(folder: Path, step: int) -> Values:
    """What the reference computed in ``step``; 0 is its state before the first."""
    values: Values = torch.load(folder / f"{step}.pt", mmap=True, weights_only=True)
    return values


def _alone(device: str) -> World:
    """A world of one, without a process group: nothing distributed has a part in the reference."""
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    return World.init(device=device)
