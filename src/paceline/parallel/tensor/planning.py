"""Where a plan comes from: the user, the model's authors, or the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor.checks import check_features, check_heads
from paceline.parallel.tensor.huggingface import own_plan, translated
from paceline.parallel.tensor.infer import infer
from paceline.parallel.tensor.plan import TensorPlan, roles_from_patterns
from paceline.parallel.tensor.splittable import splittable_modules


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
    check_heads(model, plan, sample)
    return _checked(model, plan)


def _checked(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    for name, role in plan.roles.items():
        if role != "replicate":
            check_features(name, model.get_submodule(name), role, plan.tp)
    return plan
