"""Carrying out a plan: parameters split in place under their own names, forwards to match."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from paceline.errors import LayoutError
from paceline.parallel.tensor.checks import check_features
from paceline.parallel.tensor.linear import scattered_linear, split_linear, split_parameter
from paceline.parallel.tensor.plan import TensorPlan, chunks_of
from paceline.parallel.tensor.shards import gathered, mark_logits
from paceline.parallel.tensor.splittable import Kind, kind_of
from paceline.parallel.tensor.vocabulary import split_embedding


def apply_plan(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Split ``model`` over the one-dimensional ``mesh`` in place, as ``plan`` says.

    All ranks must hold the same values (or all of them meta tensors). Parameters keep their names,
    ``requires_grad`` and ties; names that this model does not have, such as those of another
    pipeline stage, are passed over. Run the model inside ``mixing``.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tp:
        raise LayoutError(
            f"the plan is for tp={plan.tp}, the mesh {mesh.mesh_dim_names} has the shape "
            f"{tuple(mesh.shape)}. Pass the mesh of the tensor-parallel ranks, mesh['tp']."
        )
    made: dict[int, nn.Parameter] = {}  # so that tied parameters stay one
    originals: list[nn.Parameter] = []  # kept, so that no id is used twice
    modules = dict(model.named_modules(remove_duplicate=False))
    done: set[int] = set()
    for name, role in plan.roles.items():
        module = modules.get(name)
        if module is None or role == "replicate" or id(module) in done:
            continue
        kind = kind_of(module)
        if kind is None:
            continue  # a stand-in for what another pipeline stage holds
        done.add(id(module))
        check_features(name, module, role, plan.tp)
        for key, (dim, chunks) in parts(kind, role, module).items():
            parameter = module._parameters[key]
            assert parameter is not None
            originals.append(parameter)
            if id(parameter) not in made:
                made[id(parameter)] = split_parameter(parameter, mesh, dim, chunks)
        _set_forward(module, kind, role, plan.sequence)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


def parts(kind: Kind, role: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    """``{parameter: (dim, chunks)}`` that a role splits; a row-parallel bias stays whole."""
    chunks = chunks_of(role)
    if role == "row":
        return {"weight": (0 if kind == "in_first" else 1, 1)}
    made = {"weight": (1 if kind == "in_first" else 0, chunks)}
    if module._parameters.get("bias") is not None:
        made["bias"] = (0, chunks)
    return made


def _set_forward(module: nn.Module, kind: Kind, role: str, sequence: bool) -> None:
    # On the instance: the class may be anyone's, and FSDP2 exchanges it.
    forward: Any
    if kind == "embedding":
        forward = functools.partial(_embedding_forward, module)
    else:
        forward = functools.partial(_linear_forward, module, kind == "in_first", role, sequence)
    module.forward = forward


def _linear_forward(module: Any, in_first: bool, role: str, sequence: bool, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias if "bias" in module._parameters else None
    if not isinstance(weight, DTensor):  # swapped for a plain one, as when exporting
        return F.linear(x, weight.t() if in_first else weight, bias)
    if role == "row" and sequence and x.ndim >= 3:
        return scattered_linear(x, weight, bias, in_first=in_first, along=1)
    y = split_linear(x, weight, bias, in_first=in_first)
    if role == "vocabulary":
        return mark_logits(y)
    return gathered(y) if role == "gather" else y


def _embedding_forward(module: Any, input: Tensor) -> Tensor:
    weight = module.weight
    if not isinstance(weight, DTensor):
        return F.embedding(input, weight, module.padding_idx)
    return split_embedding(input, weight, module.padding_idx)
