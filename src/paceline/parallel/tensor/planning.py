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
from paceline.parallel.tensor.plan import TensorPlan, heads_of, roles_from_patterns
from paceline.parallel.tensor.splittable import (
    kind_of,
    parts,
    splittable_modules,
    why_not_split,
)


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
        roles, reasons = translated(model, own, vocabulary, tp)
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
    """``plan``, held against the model, with its ties, its shares and a reason for all else."""
    own: dict[str, tuple[int, int]] = {}  # by parameter
    parts_of_a_rank: dict[int, int] = {}  # by parameter: into how many parts it is cut
    where: dict[int, tuple[int, int]] = {}
    for name, role in plan.roles.items():
        module = model.get_submodule(name)
        kind = kind_of(module)
        if role == "replicate" or kind is None:
            continue
        check_features(name, module, role, plan.tp)
        for key, part in parts(kind, role, module).items():
            parameter = module.get_parameter(key)
            own[f"{name}.{key}" if name else key] = where[id(parameter)] = part
            parts_of_a_rank[id(parameter)] = heads_of(role) or plan.tp
    ties = {
        name: where[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in where and name not in own
    }
    sizes = {id(p): p.numel() for p in model.parameters()}
    total = max(sum(sizes.values()), 1)
    held = sum(size / parts_of_a_rank.get(i, 1) for i, size in sizes.items())
    split = sum(sizes[i] for i in parts_of_a_rank)
    reasons = {**plan.reasons, **_never_split(model, plan, set(where))}
    return replace(
        plan, reasons=reasons, ties=ties, split_share=split / total, held_share=held / total
    )


def _never_split(model: nn.Module, plan: TensorPlan, split: set[int]) -> dict[str, str]:
    """Modules of other kinds that hold matrices, which no plan could name."""
    found = {}
    for name, module in model.named_modules():
        if name in plan.roles or name in plan.reasons or kind_of(module) is not None:
            continue
        own = [
            key
            for key, p in module._parameters.items()
            if p is not None and p.ndim > 1 and id(p) not in split
        ]
        if own:
            found[name] = why_not_split(module) or (
                f"{type(module).__name__} is not a linear layer or an embedding ({', '.join(own)})"
            )
    return found
