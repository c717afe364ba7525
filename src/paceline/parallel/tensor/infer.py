"""A plan found from what a model computes: data flow and shapes, no names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.parallel.tensor.checks import check_heads_divide, share_heads
from paceline.parallel.tensor.data_flow import Findings, trace
from paceline.parallel.tensor.splittable import (
    features,
    kind_of,
    splittable_modules,
    why_not_divided,
    why_not_split,
)

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
            name: _not_taken(name, found) for name in found.columns if name not in reached
        }
        if not bad:
            break
        fixed.update(bad)
    roles, reasons = _roles(model, tp, found, packing, fixed, vocabulary)
    roles, reasons = share_heads(found, tp, roles, reasons)
    check_heads_divide(model, tp, found, roles)
    return roles, reasons


def _not_taken(name: str, found: Findings) -> str:
    if found.shared.get(name) == 1:
        return "it makes one head of keys or values, which every rank needs"
    if name in found.losses:
        return "it ends in the loss, and vocabulary=False keeps that whole"
    return "no later layer takes its output split"


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
    splittable = set(splittable_modules(model))
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and name not in splittable:
            continue
        if kind == "embedding":
            why = _embedding_reason(name, module, tp, found, vocabulary)
            roles[name] = "replicate" if why else "vocabulary"
            if why:
                reasons[name] = why
        elif kind in ("attention", "experts"):
            why = why_not_divided(kind, module, tp)
            roles[name] = "replicate" if why else kind
            if why:
                reasons[name] = why
        elif kind is None:
            continue
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
        if weight is None:
            continue
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
