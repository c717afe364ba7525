"""Where a plan comes from: the user, the model's authors, or the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor.checks import check_features, settle_heads
from paceline.parallel.tensor.huggingface import own_plan, translated
from paceline.parallel.tensor.infer import infer
from paceline.parallel.tensor.plan import TensorPlan, roles_from_patterns
from paceline.parallel.tensor.splittable import kind_of, parts, splittable_modules


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
        roles = roles_from_patterns(user, splittable_modules(model))
        reasons = {
            name: "no pattern names it" for name in splittable_modules(model) if name not in roles
        }
        plan = TensorPlan(tp, roles, reasons, "given", sequence)
    elif own := own_plan(model):
        roles, reasons = translated(model, own, vocabulary)
        plan = TensorPlan(tp, roles, reasons, "the model's own", sequence)
    elif sample is None:
        raise LayoutError(
            "no tensor-parallel plan was given, and there is no sample to find one with. Pass "
            "sample=f, called as f(model) to run the model once, or a mapping of name patterns."
        )
    else:
        roles, reasons = infer(model, tp, sample, vocabulary)
        return _checked(model, TensorPlan(tp, roles, reasons, "found by data flow", sequence))
    return _checked(model, settle_heads(model, plan, sample))


def _checked(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    for name, role in plan.roles.items():
        if role != "replicate":
            check_features(name, model.get_submodule(name), role, plan.tp)
    return replace(plan, ties=_ties(model, plan))


def _ties(model: nn.Module, plan: TensorPlan) -> dict[str, tuple[int, int]]:
    """Parameters of modules without a role that share them with one that splits them."""
    split: dict[int, tuple[int, int]] = {}
    own: set[str] = set()
    for name, role in plan.roles.items():
        module = model.get_submodule(name)
        kind = kind_of(module)
        if role == "replicate" or kind is None:
            continue
        for key, where in parts(kind, role, module).items():
            split[id(module._parameters[key])] = where
            own.add(f"{name}.{key}" if name else key)
    return {
        name: split[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in split and name not in own
    }
