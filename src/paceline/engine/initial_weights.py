"""What ranks start from: one model and one optimizer, those of rank 0.

Each rank builds its model by itself. Where they came out different, as those of a script without a
seed do, spreading would train a patchwork of them. So before anything is spread, all ranks compare
what they have built, and take over rank 0's values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.engine.optimizer_groups import Held
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.options.engine import InitialWeights
from paceline.parallel.broadcast_weights import fingerprint, take_first_values
from paceline.parallel.distributed_model import stage_holders
from paceline.parallel.dtensor import held_runs, local
from paceline.parallel.meta import Init, materialise
from paceline.world import World, collectives
from paceline.world.tensors import describe

_MARK = "_paceline_layout"
"""On every module of a model that is spread: as what."""
_TOLD = 3
"""How many differences, or names, an error or a note lists."""


def check_not_spread(model: nn.Module) -> None:
    """Refuse a model of which another engine holds this rank's part alone."""
    for module in model.modules():
        layout = module.__dict__.get(_MARK)
        if layout is not None:
            raise TrainingError(
                f"{type(model).__name__} is spread already, as {layout!r}: another engine holds "
                "this rank's part of it. Go on with that engine, or build a new model for this "
                "one (engine.state_dict()['model'] of the first loads into it)."
            )


def mark_as_spread(model: nn.Module, layout: Layout) -> None:
    """Remember that the parameters of ``model`` are parts from now on."""
    for module in model.modules():
        module.__dict__[_MARK] = str(layout)


def start_from_one_model(
    module: nn.Module,
    world: World,
    *,
    initial_weights: InitialWeights,
    settings: Mapping[str, Any],
) -> list[str]:
    """See that all ranks have built one model, with one set of values; what to tell the user.

    ``settings`` must be the same on all ranks, too. Values on the meta device are not there yet.
    A collective, as all in this file.
    """
    if world.size == 1:
        return []
    _agree("settings", {name: repr(value) for name, value in settings.items()}, world)
    _agree("model", dict(_described(module)), world)
    if initial_weights == "own":
        return []
    tensors = {
        name: tensor
        for name, tensor, _ in _tensors(module)
        if not tensor.is_meta and not isinstance(tensor, DTensor)
    }
    different = take_first_values(tensors, world.everyone, world.device)
    if not different:
        return []
    return [
        f"the ranks had built different weights ({len(different)} of {len(tensors)} tensors, "
        f"{_some(different)}): all of them start from rank 0's"
    ]


def start_from_one_optimizer(optimizer: Optimizer, model: nn.Module, world: World) -> None:
    """See that all ranks have the same kind of optimizer, with the same settings and state.

    Settings that differ are refused: none of them is more likely to be meant than another. State
    is that of rank 0.
    """
    if world.size == 1:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    described: dict[str, str] = {"kind": type(optimizer).__name__}
    tensors: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            described[name] = describe(value)
            if not value.is_meta:
                tensors[name] = value
        else:
            described[name] = _plain(value)

    for number, group in enumerate(optimizer.param_groups):
        parameters = [names[id(parameter)] for parameter in group["params"]]
        described[f"group {number}"] = f"{len(parameters)} parameters ({_digest(parameters)})"
        for key, value in group.items():
            if key not in ("params", "param_names"):
                add(f"{key} of group {number}", value)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            add(f"{key} of {names[id(parameter)]}", value)
    # State lies in the order in which it was first needed.
    _agree("optimizer", dict(sorted(described.items())), world)
    take_first_values(dict(sorted(tensors.items())), world.everyone, world.device)


def make_values(
    root: nn.Module,
    layout: Layout,
    world: World,
    init: Init | None,
    *,
    initial_weights: InitialWeights,
) -> None:
    """Give ``root``, the model or a stage of it on the meta device, its values, block by block."""
    seed = torch.initial_seed()
    share = None
    if initial_weights == "rank0" and world.size > 1:
        seed = collectives.broadcast_object(seed, 0, world.everyone)
        group = stage_holders(world, layout)

        def share(tensors: Mapping[str, Tensor]) -> None:
            take_first_values(tensors, group, world.device)

    # The values of a stage that rank 0 does not hold are its values only if they are repeatable.
    repeatable = share is not None and layout.pp > 1
    materialise(root, seed=seed, device=world.device, init=init, share=share, repeatable=repeatable)


def check_copies_are_equal(held: Held, model: nn.Module, world: World) -> None:
    """Refuse ranks that hold the same piece of a tensor with different values.

    Where ranks keep what they have built: pieces that one rank alone holds may be anything, but
    copies that differ would never become equal again. Buffers count that are shared in each step.
    """
    if world.size == 1:
        return
    own: dict[str, tuple[str, int]] = {}
    for name, parameters in held.items():
        for parameter in parameters:
            own[f"{name} {held_runs(parameter)}"] = name, fingerprint(local(parameter))
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and not buffer.is_meta:
            own[f"{name} (buffer)"] = name, fingerprint(local(buffer))
    first: dict[str, tuple[int, int]] = {}
    for rank, told in enumerate(collectives.all_gather_object(own, world.everyone)):
        for piece, (name, value) in told.items():
            other, expected = first.setdefault(piece, (rank, value))
            if value != expected:
                raise TrainingError(
                    f"initial_weights='own': ranks {other} and {rank} both hold {name}, with "
                    "different values, which would never become equal. Give them the same values "
                    "(seed all ranks alike, or load the same weights), or leave initial_weights "
                    "out: then all ranks start from rank 0's."
                )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Every parameter and buffer once, by its first name, with what it is."""
    seen: set[int] = set()
    saved = module.state_dict(keep_vars=True).keys()
    for name, parameter in module.named_parameters():
        seen.add(id(parameter))
        yield name, parameter, "parameter" if parameter.requires_grad else "frozen parameter"
    for name, buffer in module.named_buffers():
        if id(buffer) not in seen:
            yield name, buffer, "buffer" if name in saved else "buffer that is not saved"


def _described(module: nn.Module) -> Iterator[tuple[str, str]]:
    first = {}
    for name, tensor, kind in _tensors(module):
        first[id(tensor)] = name
        on_meta = " on the meta device" if tensor.is_meta else ""
        looks = "without a shape" if is_lazy(tensor) else describe(tensor)
        yield name.removeprefix("model."), f"a {kind}, {looks}{on_meta}"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first[id(parameter)] != name:
            shared = first[id(parameter)].removeprefix("model.")
            yield name.removeprefix("model."), f"the same as {shared}"


def _agree(what: str, own: Mapping[str, str], world: World) -> None:
    """Raise on all ranks where ``own`` is not the same on all of them."""
    digests = collectives.all_gather_object(_digest(own), world.everyone)
    if len(set(digests)) == 1:
        return
    told = collectives.all_gather_object(dict(own), world.everyone)
    rank = next(r for r, digest in enumerate(digests) if digest != digests[0])
    first, other = told[0], told[rank]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    differences = [
        f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on "
        f"rank {rank}"
        for name in names[:_TOLD]
    ] or ["their order differs"]
    more = f"; and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    raise TrainingError(f"{_DIFFER[what]}: {'; '.join(differences)}{more}. {_REMEDY[what]}")


_DIFFER = {
    "settings": "the ranks were given different settings",
    "model": "the ranks have built different models",
    "optimizer": "the ranks have different optimizers",
}
_REMEDY = {
    "settings": "Give every rank the same.",
    "model": "Every rank must build the same model; only its values may differ, since all ranks "
    "take over rank 0's.",
    "optimizer": "Give every rank the same one; what is drawn at random can be drawn on rank 0 and "
    "sent with paceline.collectives.broadcast_object.",
}


def _digest(value: Any) -> str:
    items = list(value.items()) if isinstance(value, Mapping) else value
    return hashlib.blake2b(repr(items).encode(), digest_size=12).hexdigest()


def _plain(value: Any) -> str:
    """A setting in words; of objects, whose text may hold an address, the kind alone."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    if value is None or isinstance(value, str | int | float | complex):
        return repr(value)
    return f"a {type(value).__name__}"


def _some(names: list[str]) -> str:
    listed = ", ".join(name.removeprefix("model.") for name in names[:_TOLD])
    return f"{listed}, …" if len(names) > _TOLD else listed
