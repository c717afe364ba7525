"""The check of ``tp`` against a model: its heads, and the features of its layers, must divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor.data_flow import Findings, trace
from paceline.parallel.tensor.plan import ROLES, TensorPlan, chunks_of, heads_of
from paceline.parallel.tensor.splittable import (
    features,
    kind_of,
    splittable_modules,
    why_not_divided,
)

Roles = dict[str, str]


def settle_heads(
    model: nn.Module, plan: TensorPlan, sample: Callable[[nn.Module], Any] | None
) -> TensorPlan:
    """Follow the plan through one pass, where there is a sample, to see that heads divide."""
    if sample is None:
        return plan
    columns = {n: r for n, r in plan.roles.items() if r == "column" or r.startswith("packed:")}
    packing = {name: chunks_of(role) for name, role in columns.items() if chunks_of(role) > 1}
    whole = {n for n in splittable_modules(model) if plan.roles.get(n, "replicate") != "row"}
    found = trace(model, sample, packing, whole - set(columns))
    roles, reasons = share_heads(found, plan.tp, dict(plan.roles), dict(plan.reasons))
    check_heads_divide(model, plan.tp, found, roles)
    return replace(plan, roles=roles, reasons=reasons)


def share_heads(found: Findings, tp: int, roles: Roles, reasons: Roles) -> tuple[Roles, Roles]:
    """Let several ranks hold each head of keys and values, where there are fewer than ranks."""
    for name, heads in found.shared.items():
        if roles.get(name) != "column":
            continue
        if heads == 1:
            roles[name] = "replicate"
            reasons[name] = "it makes one head of keys or values, which every rank needs"
        elif _is_odd(found, name, tp) and _fits(found, name, tp):
            roles[name] = f"heads:{heads}"
    return roles, reasons


def _is_odd(found: Findings, name: str, tp: int) -> bool:
    return any(unit % tp for unit in found.columns[name])


def _fits(found: Findings, name: str, tp: int) -> bool:
    """Whether ``tp`` ranks can share a column: each its part, or several of them each head."""
    heads = found.shared.get(name)
    whole_heads = heads is not None and tp % heads == 0
    return all(
        unit % tp == 0 or (whole_heads and heads is not None and unit % heads == 0)
        for unit in found.columns[name]
    )


def check_heads_divide(model: nn.Module, tp: int, found: Findings, roles: Roles) -> None:
    """Refuse columns whose features or heads do not divide, with the numbers."""
    problems = []
    for name, units in found.columns.items():
        role = roles.get(name, "")
        if role != "column" and not role.startswith("packed:"):
            continue
        if not _is_odd(found, name, tp):
            continue
        odd = min(unit for unit in units if unit % tp)
        chunks = chunks_of(role)
        _, outputs = features(model.get_submodule(name))
        text = f"{outputs} output features" + (f" in {chunks} chunks" if chunks > 1 else "")
        if odd != outputs // chunks:
            text += f" that form {odd} heads"
        fits = [n for n in range(2, max(units) + 1) if _fits(found, name, n)]
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


def check_features(name: str, module: nn.Module, role: str, tp: int) -> None:
    """Refuse features that do not divide; a vocabulary may be uneven."""
    kind = kind_of(module)
    if kind == "embedding":
        if role != "vocabulary":
            raise LayoutError(
                f"tensor-parallel plan: {name} is an embedding and cannot be {role!r}: its rows "
                "can be split ('vocabulary'), or it stays whole ('replicate')."
            )
        return
    if kind in ("attention", "experts") or role in ("attention", "experts"):
        if role != kind:
            raise LayoutError(
                f"tensor-parallel plan: {name} cannot be {role!r}: "
                + (f"it is {kind!r} or 'replicate'." if kind in ROLES else "it is one layer.")
            )
        if (why := why_not_divided(kind, module, tp)) is not None:
            raise LayoutError(f"tensor-parallel plan: {name}: {why}. 'replicate' it, or change tp.")
        return
    if role in ("vocabulary", "gather"):
        return
    inputs, outputs = features(module)
    if (heads := heads_of(role)) is not None:
        if outputs % heads or tp % heads:
            raise LayoutError(
                f"tensor-parallel plan: {name} is {role!r}, with {outputs} output features and "
                f"tp={tp}. The number of heads must divide both; where tp divides the heads, the "
                "role is 'column'."
            )
        return
    size, word = (inputs, "input") if role == "row" else (outputs, "output")
    unit = chunks_of(role) * tp
    if size % unit:
        packing = f" in {chunks_of(role)} chunks" if chunks_of(role) > 1 else ""
        raise LayoutError(
            f"tensor-parallel plan: {name} has {size} {word} features{packing}, which do not "
            f"divide by tp={tp}. {_what_would(size // chunks_of(role))}, or 'replicate' it."
        )


def _what_would(size: int) -> str:
    fits = [n for n in range(2, min(size, 64) + 1) if size % n == 0]
    return f"tp={', '.join(map(str, fits))} would do" if fits else "No tp above 1 would do"
