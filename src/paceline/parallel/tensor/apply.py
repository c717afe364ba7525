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
from paceline.parallel.tensor.experts import split_experts
from paceline.parallel.tensor.linear import scattered_linear, split_linear, split_parameter
from paceline.parallel.tensor.plan import TensorPlan, heads_of
from paceline.parallel.tensor.shards import gathered, mark_logits
from paceline.parallel.tensor.shared_heads import heads_mesh, share_parameter, shared_linear
from paceline.parallel.tensor.splittable import Kind, kind_of, parts
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
    # Made by all ranks, whatever their pipeline stage holds: torch makes groups of all at once.
    counts = sorted({heads for role in plan.roles.values() if (heads := heads_of(role))})
    grids = {heads: heads_mesh(mesh, heads) for heads in counts}
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
            parameter = module.get_parameter(key)
            originals.append(parameter)
            if id(parameter) not in made:
                heads = heads_of(role)
                made[id(parameter)] = (
                    split_parameter(parameter, mesh, dim, chunks)
                    if heads is None
                    else share_parameter(parameter, grids[heads], dim)
                )
        _set_forward(module, kind, role, plan.sequence, mesh)
    held = dict(model.named_parameters(remove_duplicate=False))
    for name, (dim, chunks) in plan.ties.items():
        tied = held.get(name)
        if tied is not None and not isinstance(tied, DTensor) and id(tied) not in made:
            originals.append(tied)
            made[id(tied)] = split_parameter(tied, mesh, dim, chunks)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


def _set_forward(
    module: nn.Module, kind: Kind, role: str, sequence: bool, mesh: DeviceMesh
) -> None:
    # On the instance: the class may be anyone's, and FSDP2 exchanges it.
    forward: Any
    if kind == "embedding":
        forward = functools.partial(_embedding_forward, module)
    elif kind == "attention":
        return  # its forward ends in a function that dispatch.py knows
    elif kind == "experts":
        forward = functools.partial(split_experts, module, module.forward, mesh)
    elif heads_of(role) is not None:
        forward = functools.partial(_shared_forward, module, kind == "in_first", mesh)
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


def _shared_forward(module: Any, in_first: bool, mesh: DeviceMesh, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias if "bias" in module._parameters else None
    if not isinstance(weight, DTensor):
        return F.linear(x, weight.t() if in_first else weight, bias)
    return shared_linear(x, weight, bias, mesh, in_first=in_first)


def _embedding_forward(module: Any, input: Tensor) -> Tensor:
    weight = module.weight
    if not isinstance(weight, DTensor):
        return F.embedding(input, weight, module.padding_idx)
    return split_embedding(input, weight, module.padding_idx)
