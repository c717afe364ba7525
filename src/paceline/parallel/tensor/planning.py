"""Where a plan comes from: the user, the model's authors, or the model itself."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor.apply import check_divides, chunks_of
from paceline.parallel.tensor.infer import check_units, infer, trace
from paceline.parallel.tensor.plan import TensorPlan, roles_from_patterns
from paceline.parallel.tensor.splittable import kind_of, why_not_split

# Hugging Face's words for what we have words of our own for.
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "embedding_rowwise": "vocabulary",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate",
    "packed_colwise": "packed:2",
}


def make_plan(
    model: nn.Module,
    tp: int,
    *,
    sample: Callable[[nn.Module], Any] | None = None,
    user: Mapping[str, str] | None = None,
    sequence: bool = False,
    vocabulary: bool = True,
) -> TensorPlan:
    """The plan for ``model`` on ``tp`` ranks; needs no process group and changes nothing.

    From ``user``, name patterns and roles; else the model's own, as Hugging Face models carry it;
    else found by following the data of one forward pass, which ``sample(model)`` runs.
    """
    if user is not None:
        roles = roles_from_patterns(user, _splittable(model))
        reasons = {name: "no pattern names it" for name in _splittable(model) if name not in roles}
        plan = TensorPlan(tp, roles, reasons, "given", sequence)
    elif own := _own_plan(model):
        roles, reasons = _translated(model, own, vocabulary)
        plan = TensorPlan(tp, roles, reasons, "the model's own", sequence)
    elif sample is None:
        raise LayoutError(
            "no tensor-parallel plan was given, and there is no sample to find one with. Pass "
            "sample=f, called as f(model) to run the model once, or a mapping of name patterns."
        )
    else:
        roles, reasons = infer(model, tp, sample, vocabulary)
        return _checked(model, TensorPlan(tp, roles, reasons, "found by data flow", sequence))
    _check_heads(model, plan, sample)
    return _checked(model, plan)


def _own_plan(model: nn.Module) -> dict[str, str]:
    """A Hugging Face model's own plan, with names from the model's root; empty without one."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) and hasattr(model, "config") else {}


def _translated(
    model: Any, own: Mapping[str, str], vocabulary: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The model's plan in our words; styles we have no word for stay whole, and say so."""
    roles: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name in _splittable(model):
        style = next((s for p, s in own.items() if fnmatch.fnmatchcase(name, p)), None)
        if style is None:
            reasons[name] = "the model's own plan does not name it"
        elif style not in _STYLES:
            reasons[name] = f"the model's own plan says {style!r}, which Paceline does not know"
        else:
            roles[name] = _STYLES[style]
            if roles[name] == "replicate":
                reasons[name] = "the model's own plan says so"
    if vocabulary:
        _split_vocabulary(model, roles, reasons)
    return roles, reasons


def _split_vocabulary(model: Any, roles: dict[str, str], reasons: dict[str, str]) -> None:
    """Split the embedding and the output layer too, which the model itself points out."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for name, module in model.named_modules():
        at_an_end = any(module is end for end in ends) and why_not_split(module) is None
        if at_an_end and kind_of(module) in ("embedding", "out_first"):
            roles[name] = "vocabulary"
            reasons.pop(name, None)


def _check_heads(
    model: nn.Module, plan: TensorPlan, sample: Callable[[nn.Module], Any] | None
) -> None:
    """Follow the plan through one pass, where there is a sample, to see that heads divide."""
    if sample is None:
        return
    columns = {n: r for n, r in plan.roles.items() if r == "column" or r.startswith("packed:")}
    packing = {name: chunks_of(role) for name, role in columns.items() if chunks_of(role) > 1}
    whole = {n for n in _splittable(model) if plan.roles.get(n, "replicate") != "row"}
    found = trace(model, sample, packing, whole - set(columns))
    check_units(model, plan.tp, found, dict(plan.roles))


def _splittable(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if kind_of(module) is not None]


def _checked(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    for name, role in plan.roles.items():
        if role != "replicate":
            check_divides(name, model.get_submodule(name), role, plan.tp)
    return plan
