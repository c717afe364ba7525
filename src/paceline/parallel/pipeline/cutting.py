"""Cutting a model into stages: found by running it once on tensors without data."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import LayoutError
from paceline.options import Pipelining
from paceline.parallel.pipeline.cut_plan import CutPlan, lightest_cuts
from paceline.parallel.pipeline.shape_run import MeasuringRun, ShapeRun
from paceline.parallel.pipeline.stage import StageRehearsal
from paceline.parallel.pipeline.tracing import Name
from paceline.parallel.pipeline.units import Skeleton

_MEASURED = 3


def model_of(module: nn.Module) -> nn.Module:
    """The user's model inside what computes its loss."""
    inner = getattr(module, "model", None)
    return inner if isinstance(inner, nn.Module) else module


def cut(
    module: nn.Module, run_probe: Callable[[], Any], pp: int, options: Pipelining | None = None
) -> CutPlan:
    """Cut ``module`` for ``pp`` ranks; nothing is communicated or changed.

    ``run_probe`` calls ``module`` on a sample batch, in the context in which it will be trained,
    and returns what it returns. Raises ``LayoutError`` for a model that cannot be cut.
    """
    options = options or Pipelining()
    stages = options.stages(pp)
    model = model_of(module)
    extra = _extra_units(model, options.cuts or ())
    hooks = _hooks(model)
    skeleton = Skeleton(model, extra)
    try:
        shapes = _watched(skeleton, run_probe, options.balance)
        if _hooks(model) != hooks:  # a model may put hooks on its modules when it first runs
            skeleton.catching.restore()
            skeleton = Skeleton(model, extra)
            shapes = _watched(skeleton, run_probe, options.balance)
        _check_enough(shapes.units, stages, pp)
        if options.cuts is not None:
            starts = _named_cuts(options.cuts, shapes.units, stages, pp, model)
            costs = _costs(skeleton, shapes, "parameters", run_probe)
            balance = "parameters"
        else:
            balance = options.balance
            costs = _costs(skeleton, shapes, balance, run_probe)
            traffic = [_bytes(shapes, _needed(shapes, a)) for a in range(len(shapes.units))]
            starts = lightest_cuts(costs, stages, traffic)
        _check_escapes(shapes, starts)
        plan = _plan(skeleton, shapes, [0, *starts], costs, balance)
        _rehearse(skeleton, shapes, plan, run_probe)
    finally:
        skeleton.catching.restore()
    return plan


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _watched(skeleton: Skeleton, run_probe: Callable[[], Any], balance: str) -> ShapeRun:
    buffers = _Buffers(skeleton)
    shapes = skeleton.shapes(
        run_probe,
        [name for name, _ in skeleton.model.named_parameters()],
        count_flops=balance == "flops",
    )
    buffers.check()
    return shapes


def _check_escapes(shapes: ShapeRun, starts: Sequence[int]) -> None:
    for call, place, where in shapes.escaped:
        for start in starts:
            if call < start and place > 2 * start:
                raise LayoutError(
                    f"pipeline: a value that {shapes.units[call]!r} computes leaves it by a side "
                    f"way (a hook, or an attribute) and is used on a later stage ({where}). Only "
                    "what modules return can cross. Return it, or cut so that both are on one "
                    "stage: Pipelining(cuts=[...])."
                )


def _extra_units(model: nn.Module, cuts: Sequence[str]) -> list[str]:
    """Modules that a cut names and that hold nothing: cutting there makes them units."""
    modules = dict(model.named_modules())
    names = [cut.partition("@")[0] for cut in cuts]
    return [
        name
        for name in names
        if name in modules
        and next(modules[name].parameters(), None) is None
        and next(modules[name].children(), None) is None
    ]


def _check_enough(units: Sequence[str], stages: int, pp: int) -> None:
    if len(units) < stages:
        raise LayoutError(
            f"pipeline: pp={pp} needs {stages} stages, but the model calls only {len(units)} "
            f"modules between which it can be cut ({', '.join(units) or 'none'}). Use a smaller "
            "pp or fewer stages_per_rank, or split its modules into smaller ones."
        )


def _named_cuts(
    cuts: Sequence[str], units: Sequence[str], stages: int, pp: int, model: nn.Module
) -> list[int]:
    if len(cuts) != stages - 1:
        raise LayoutError(
            f"pipeline: {len(cuts)} cuts make {len(cuts) + 1} stages, but pp={pp} with "
            f"{stages // pp} a rank has {stages}. Give {stages - 1} cuts."
        )
    found = [_call_of(name, units, model) for name in cuts]
    for earlier, later, name, other in zip([0, *found], found, cuts, ["", *cuts], strict=False):
        if later <= earlier:
            raise LayoutError(
                f"pipeline: the cut {name!r} (module {later + 1} of {len(units)} to run) does not "
                f"come after {other!r} (module {earlier + 1})."
                if other
                else f"pipeline: the cut {name!r} is the first module to run, and stage 0 would "
                "be empty. Name modules that start a later stage, in the order in which they run."
            )
    return found


def _call_of(cut: str, units: Sequence[str], model: nn.Module) -> int:
    name, _, count = cut.partition("@")
    calls = [i for i, unit in enumerate(units) if unit == name or unit.startswith(name + ".")]
    if count:
        calls = [i for i, unit in enumerate(units) if unit == name]
        if not count.isdigit() or not 0 < int(count) <= len(calls):
            raise LayoutError(
                f"pipeline: the cut {cut!r} asks for call {count} of {name!r}, which is called "
                f"{len(calls)} times."
            )
        return calls[int(count) - 1]
    if calls:
        return calls[0]
    inside = [unit for unit in units if name.startswith(unit + ".")]
    if inside:
        raise LayoutError(
            f"pipeline: the cut {cut!r} lies inside {inside[0]!r}, which runs as a whole. Cut at "
            f"{inside[0]!r} or another of: {', '.join(dict.fromkeys(units))}."
        )
    known = {path for path, _ in model.named_modules()}
    if name in known:
        raise LayoutError(
            f"pipeline: nothing can be cut at {cut!r}: the model does not call it, or it holds no "
            f"parameters. Cut at one of: {', '.join(dict.fromkeys(units))}."
        )
    near = difflib.get_close_matches(name, [*dict.fromkeys(units)], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise LayoutError(
        f"pipeline: the cut {cut!r} is no module of the model.{hint} It can be cut at: "
        f"{', '.join(dict.fromkeys(units))}."
    )


def _made_at(name: Name) -> int:
    """Where a value comes into being, in the places of ``ShapeRun``."""
    return 2 * int(name[1]) + (name[0] == "call")


def _needed(shapes: ShapeRun, start: int) -> tuple[Name, ...]:
    """The values made before the call ``start`` and used from it on."""
    names = [
        name
        for name, places in shapes.used.items()
        if name[0] != "param" and _made_at(name) <= 2 * start and max(places) > 2 * start
    ]
    return tuple(sorted(names, key=lambda name: (_made_at(name), name)))


def _bytes(shapes: ShapeRun, names: Iterable[Name]) -> int:
    return sum(shapes.specs[name].bytes for name in names)


def _glue_uses(shapes: ShapeRun) -> dict[str, list[int]]:
    """For each parameter that code between units uses: after which call of a unit."""
    return {
        name[1]: sorted({max(place // 2 - 1, 0) for place in places if place % 2 == 0})
        for name, places in shapes.used.items()
        if name[0] == "param" and any(place % 2 == 0 for place in places)
    }


def _costs(
    skeleton: Skeleton, shapes: ShapeRun, balance: str, run_probe: Callable[[], Any]
) -> list[float]:
    if balance == "flops":
        return [float(flops) for flops in shapes.flops]
    if balance == "time":
        return _measured(skeleton, run_probe)
    costs = [float(sum(p.numel() for p in skeleton.units[u].parameters())) for u in shapes.units]
    for name, calls in _glue_uses(shapes).items():
        costs[calls[0]] += skeleton.fake_parameters[name].numel()
    return costs


def _measured(skeleton: Skeleton, run_probe: Callable[[], Any]) -> list[float]:
    parameter = next(skeleton.model.parameters())
    taken: list[list[float]] = []
    buffers = {name: buffer.clone() for name, buffer in skeleton.model.named_buffers()}
    with torch.no_grad():
        for _ in range(_MEASURED + 1):  # the first one warms up
            run = MeasuringRun(parameter.device)
            with skeleton.running(run, []):
                run_probe()
            taken.append(run.seconds)
        for name, buffer in skeleton.model.named_buffers():
            buffer.copy_(buffers[name])  # running statistics have seen the sample
    return [min(times) for times in zip(*taken[1:], strict=True)]


def _plan(
    skeleton: Skeleton, shapes: ShapeRun, starts: list[int], costs: list[float], balance: str
) -> CutPlan:
    units, stages = shapes.units, len(starts)
    stage_of = [sum(start <= call for start in starts) - 1 for call in range(len(units))]
    unit_stages: dict[str, set[int]] = {name: set() for name in skeleton.units}
    for call, name in enumerate(units):
        unit_stages[name].add(stage_of[call])
    for stages_of_unit in unit_stages.values():
        if not stages_of_unit:  # never called: it has to be somewhere
            stages_of_unit.add(stages - 1)
    glue = {name: {stage_of[call] for call in calls} for name, calls in _glue_uses(shapes).items()}
    names = {id(p): name for name, p in skeleton.model.named_parameters()}
    holders: dict[str, set[int]] = {n: set(glue.get(n, ())) for n in names.values()}
    for unit in units:
        for parameter in skeleton.units[unit].parameters():
            holders[names[id(parameter)]] |= unit_stages[unit]
    for held in holders.values():  # what nothing uses has to be somewhere
        if not held:
            held.add(stages - 1)
    _check_shared_buffers(skeleton, unit_stages)
    crossing = [_needed(shapes, start) for start in starts[1:]]
    ends = [*starts[1:], len(units)]
    sizes = {name: p.numel() for name, p in skeleton.model.named_parameters()}
    return CutPlan(
        units=tuple(units),
        starts=tuple(starts),
        crossing=tuple(crossing),
        crossing_bytes=tuple(_bytes(shapes, names) for names in crossing),
        holders={name: tuple(sorted(held)) for name, held in holders.items()},
        used_in_glue={name: tuple(sorted(held)) for name, held in glue.items()},
        unit_stages={name: tuple(sorted(held)) for name, held in unit_stages.items()},
        late={call: tuple(indices) for call, indices in shapes.late.items()},
        parameters=tuple(
            sum(sizes[name] for name, held in holders.items() if stage in held)
            for stage in range(stages)
        ),
        costs=tuple(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)),
        balance=balance,
        extra_units=tuple(n for n in skeleton.units if _is_extra(skeleton.units[n])),
    )


def _is_extra(unit: nn.Module) -> bool:
    return next(unit.parameters(), None) is None and not unit.state_dict()


def _check_shared_buffers(skeleton: Skeleton, unit_stages: dict[str, set[int]]) -> None:
    for name, held in unit_stages.items():
        if len(held) > 1 and skeleton.units[name].state_dict().keys() - {
            key for key, _ in skeleton.units[name].named_parameters(remove_duplicate=False)
        }:
            raise LayoutError(
                f"pipeline: {name!r} is called on the stages {sorted(held)} and keeps buffers, "
                "which would drift apart. Cut so that its calls fall into one stage: "
                "Pipelining(cuts=[...])."
            )


class _Buffers:
    """Buffers outside units, which every stage would update on its own."""

    def __init__(self, skeleton: Skeleton) -> None:
        inside = {id(b) for unit in skeleton.units.values() for b in unit.buffers()}
        self._model = skeleton.model
        self._seen = {
            name: (id(buffer), buffer._version)
            for name, buffer in skeleton.model.named_buffers()
            if id(buffer) not in inside
        }

    def check(self) -> None:
        """Refuse a model whose code between units wrote to one."""
        saved = self._model.state_dict(keep_vars=True)
        for name, buffer in self._model.named_buffers():
            if name in saved and self._seen.get(name, (id(buffer), buffer._version)) != (
                id(buffer),
                buffer._version,
            ):
                raise LayoutError(
                    f"pipeline: the model's forward changes its buffer {name!r} outside any module "
                    "that runs as a whole; every stage would do so on its own. Keep it in a module "
                    "of its own that is called."
                )


def _rehearse(
    skeleton: Skeleton, shapes: ShapeRun, plan: CutPlan, run_probe: Callable[[], Any]
) -> None:
    """Go through every stage with zeros for what it receives and computes."""
    parameters = dict(skeleton.model.named_parameters())
    for stage in range(plan.stages):
        first, last = plan.span(stage)
        received = {}
        for name in plan.crossing[stage - 1] if stage else ():
            spec = shapes.specs[name]
            received[name] = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        wanted = plan.crossing[stage] if stage < plan.stages - 1 else ()
        run = StageRehearsal(
            fakes=skeleton.fakes,
            units=plan.units,
            templates=shapes.templates,
            late=plan.late,
            first=first,
            last=last,
            received=received,
            wanted=wanted,
            replacements={},
            pass_over=skeleton.pass_over,
        )
        bindings = skeleton.stage_bindings(plan, stage, parameters.__getitem__)
        with torch.no_grad(), skeleton.running(run, bindings):
            run.use(run_probe(), "the loss")
        missing = [name for name in wanted if name not in run.found]
        assert not missing, (stage, missing)
