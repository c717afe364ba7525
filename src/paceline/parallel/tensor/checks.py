"""The check of ``tp`` against a model: its heads, and the features of its layers, must divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor.data_flow import Findings, trace
from paceline.parallel.tensor.plan import TensorPlan, chunks_of
from paceline.parallel.tensor.splittable import features, kind_of, splittable_modules


def check_heads(
    model: nn.Module, plan: TensorPlan, sample: Callable[[nn.Module], Any] | None
) -> None:
    """Follow the plan through one pass, where there is a sample, to see that heads divide."""
    if sample is None:
        return
    columns = {n: r for n, r in plan.roles.items() if r == "column" or r.startswith("packed:")}
    packing = {name: chunks_of(role) for name, role in columns.items() if chunks_of(role) > 1}
    whole = {n for n in splittable_modules(model) if plan.roles.get(n, "replicate") != "row"}
    found = trace(model, sample, packing, whole - set(columns))
    check_heads_divide(model, plan.tp, found, dict(plan.roles))


def check_heads_divide(model: nn.Module, tp: int, found: Findings, roles: dict[str, str]) -> None:
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
    if role in ("vocabulary", "gather"):
        return
    inputs, outputs = features(module)
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
