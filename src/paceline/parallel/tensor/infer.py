"""A plan found from what a model computes: data flow and shapes, no names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor.apply import chunks_of
from paceline.parallel.tensor.data_flow import Findings, Flow, without_data
from paceline.parallel.tensor.splittable import features, kind_of, why_not_split

_ROWS_A_RANK = 16  # an embedding with fewer rows a rank is not worth a collective


def infer(
    model: nn.Module, tp: int, sample: Callable[[nn.Module], Any], vocabulary: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """``(roles, reasons)`` for a model that ``sample(model)`` runs."""
    packing: dict[str, int] = {}
    fixed: dict[str, str] = {}
    while True:
        found = trace(model, sample, packing, set(fixed))
        # A layer that may work packed first: what comes after it looks different then.
        if found.packings:
            packing.update(found.packings)
            continue
        reached = found.consumed | (found.losses if vocabulary else set())
        bad = dict(found.whole) or {
            name: _not_taken(name in found.losses) for name in found.columns if name not in reached
        }
        if not bad:
            break
        fixed.update(bad)
    roles, reasons = _roles(model, tp, found, packing, fixed, vocabulary)
    check_units(model, tp, found, roles)
    return roles, reasons


def _not_taken(in_loss: bool) -> str:
    if in_loss:
        return "it ends in the loss, and vocabulary=False keeps that whole"
    return "no later layer takes its output split"


def trace(
    model: nn.Module, sample: Callable[[nn.Module], Any], packing: dict[str, int], fixed: set[str]
) -> Findings:
    """One run of the model, without values where it can do without."""
    flow = Flow(model, packing, fixed)
    try:
        with _as_it_was(model), without_data(model):
            return flow.run(sample)
    except Exception as error:
        # A model that looks at values cannot run without them.
        if any(p.is_meta for p in model.parameters()):
            raise LayoutError(
                f"no tensor-parallel plan was found: {type(model).__name__} on the meta device "
                f"does not run without values ({type(error).__name__}: {error}). Give the plan as "
                "a mapping of name patterns."
            ) from error
        with _as_it_was(model):
            return Flow(model, packing, fixed).run(sample)


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Leave random state and buffers as they were."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _roles(
    model: nn.Module,
    tp: int,
    found: Findings,
    packing: dict[str, int],
    fixed: dict[str, str],
    vocabulary: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    roles: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind == "embedding":
            why = _embedding_reason(name, module, tp, found, vocabulary)
            roles[name] = "replicate" if why else "vocabulary"
            if why:
                reasons[name] = why
        elif kind is None:
            if own := [k for k, p in module._parameters.items() if p is not None and p.ndim > 1]:
                reasons[name] = why_not_split(module) or (
                    f"{type(module).__name__} is not a linear layer or an embedding "
                    f"({', '.join(own)})"
                )
        elif name in found.rows:
            roles[name] = "row"
        elif name in found.columns and name not in fixed:
            if name in found.losses and name not in found.consumed:
                outputs = features(module)[1]
                small = outputs < _ROWS_A_RANK * tp
                roles[name] = "replicate" if small else "vocabulary"
                if small:
                    reasons[name] = f"{outputs} classes are fewer than {_ROWS_A_RANK} a rank"
            else:
                chunks = packing.get(name, 1)
                roles[name] = f"packed:{chunks}" if chunks > 1 else "column"
        else:
            never = "it was not called as a module in the sample run"
            roles[name] = "replicate"
            reasons[name] = fixed.get(name, never)
    _settle_ties(model, roles, reasons, found.called)
    return roles, reasons


def _embedding_reason(
    name: str, module: nn.Module, tp: int, found: Findings, vocabulary: bool
) -> str | None:
    why = why_not_split(module)
    weight = module._parameters["weight"]
    assert weight is not None
    if why is not None:
        return why
    if not vocabulary:
        return "vocabulary=False"
    if name not in found.called:
        return "it was not called as a module in the sample run"
    if name not in found.looked_up:
        return "it is not indexed by the model's inputs, as a table of positions is not"
    if weight.shape[0] < _ROWS_A_RANK * tp:
        return f"{weight.shape[0]} rows are fewer than {_ROWS_A_RANK} a rank"
    return None


def _settle_ties(
    model: nn.Module, roles: dict[str, str], reasons: dict[str, str], called: set[str]
) -> None:
    """Modules that share a weight must split it alike, or leave it whole together."""
    sharing: dict[int, list[str]] = {}
    for name in roles:
        weight = model.get_submodule(name)._parameters.get("weight")
        sharing.setdefault(id(weight), []).append(name)
    for names in sharing.values():
        idle = [name for name in names if name not in called]  # bound by what the others do
        names = [name for name in names if name in called]
        if len(names) + len(idle) < 2 or not names:
            continue
        kinds = {name: kind_of(model.get_submodule(name)) for name in names}
        tables = [name for name in names if kinds[name] == "embedding"]
        others = [name for name in names if kinds[name] != "embedding"]
        split = [name for name in names if roles[name] != "replicate"]
        same = all(kinds[n] == "out_first" and roles[n] in _BY_ROWS for n in others)
        if not split or (tables and same and all(roles[n] == "vocabulary" for n in tables)):
            for name in split and [n for n in (*others, *idle) if roles[n] == "replicate"]:
                # The table's rows are split, so this one's outputs are.
                roles[name] = "vocabulary" if name in idle else "gather"
                reasons.pop(name, None)
            continue
        if len({(roles[n], kinds[n]) for n in names}) > 1:
            for name in split:
                roles[name] = "replicate"
                reasons[name] = (
                    f"it shares its weight with {', '.join(n for n in names if n != name)}"
                )


_BY_ROWS = ("vocabulary", "gather", "replicate")


def check_units(model: nn.Module, tp: int, found: Findings, roles: dict[str, str]) -> None:
    """Refuse columns whose features or heads do not divide, with the numbers."""
    problems = []
    for name, units in found.columns.items():
        role = roles.get(name, "")
        if role != "column" and not role.startswith("packed:"):
            continue
        odd = min((unit for unit in units if unit % tp), default=None)
        if odd is None:
            continue
        chunks = chunks_of(role)
        _, outputs = features(model.get_submodule(name))
        text = f"{outputs} output features" + (f" in {chunks} chunks" if chunks > 1 else "")
        if odd != outputs // chunks:
            text += f" that form {odd} heads"
        fits = [n for n in range(2, min(units) + 1) if all(u % n == 0 for u in units)]
        would = f"tp={', '.join(map(str, fits))} would do" if fits else "no tp above 1 would do"
        problems.append(f"{name}: {text}, not a multiple of tp={tp}; {would}")
    if problems:
        more = f"\n  and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise LayoutError(
            f"tp={tp} does not divide this model's heads or features:\n  "
            + "\n  ".join(problems[:4])
            + more
            + "\nChoose another tp, or give a plan that leaves these layers whole."
        )
