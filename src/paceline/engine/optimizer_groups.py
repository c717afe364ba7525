"""One optimizer over a model's parameters before and after the model was spread.

The optimizer is made over the whole parameters. ModelSetup puts others in their place, of which a
rank may hold a part, none, or (a tied weight on two pipeline stages) two copies. The groups keep
their settings and their order; what the optimizer saves is that of the whole parameters again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.errors import TrainingError
from paceline.parallel.dtensor import as_part, same_shape, whole

Held = Mapping[str, Sequence[nn.Parameter]]
"""By name in the whole model: the parameters that this rank holds of it."""


class Groups:
    """The names of the parameters in each group of ``optimizer``, from before the spreading."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        names = {}
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name
        self.names = [
            [names[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        self._before = {
            names[id(p)]: p for group in optimizer.param_groups for p in group["params"]
        }

    def follow(self, optimizer: Optimizer, held: Held, model: nn.Module) -> None:
        """Learn the names of parameters that joined ``optimizer`` since, by ``add_param_group``.

        Those of other pipeline stages are on the meta device here: they have a name as well.
        """
        added = optimizer.param_groups[len(self.names) :]
        if not added:
            return
        names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        names |= {id(p): name for name, own in held.items() for p in own}
        for group in added:
            strangers = sum(id(parameter) not in names for parameter in group["params"])
            if strangers:
                raise TrainingError(
                    f"add_param_group gave the optimizer {strangers} parameters that are not the "
                    "model's. Take them from engine.model, which holds what this rank trains."
                )
            own = list(dict.fromkeys(names[id(parameter)] for parameter in group["params"]))
            self.names.append(own)
            group["params"] = [p for name in own for p in held.get(name, ())]

    def repoint(self, optimizer: Optimizer, held: Held) -> None:
        """Make ``optimizer`` update what this rank holds; state it has already goes along."""
        state = dict(optimizer.state)
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, self.names, strict=True):
            group["params"] = [p for name in names for p in held.get(name, ())]
        for name, before in self._before.items():
            for parameter in held.get(name, ()):
                if before in state:
                    optimizer.state[parameter] = {
                        key: _spread(name, value, parameter) for key, value in state[before].items()
                    }
        self._before.clear()  # lets go of the whole parameters
        if any(len(_by_kind(group["params"])) > 1 for group in optimizer.param_groups):
            _update_kind_by_kind(optimizer)

    def state(self, optimizer: Optimizer, held: Held) -> dict[str, dict[str, Any]]:
        """By name: the state of the whole of each parameter this rank holds a part of."""
        found = {}
        for name in (name for names in self.names for name in names):
            for parameter in held.get(name, ())[:1]:
                if parameter in optimizer.state:
                    found[name] = {
                        key: whole(value).clone() if isinstance(value, Tensor) else value
                        for key, value in optimizer.state[parameter].items()
                    }
        return found

    def state_dict(self, optimizer: Optimizer, by_name: Mapping[str, Any]) -> dict[str, Any]:
        """What one process's optimizer would save, from the state of all parameters."""
        numbers = self._numbers()
        groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": [numbers[n] for n in names],
            }
            for group, names in zip(optimizer.param_groups, self.names, strict=True)
        ]
        state = {number: by_name[name] for name, number in numbers.items() if name in by_name}
        return {"state": state, "param_groups": groups}

    def load(self, optimizer: Optimizer, held: Held, saved: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, cut to what this rank holds."""
        state = {
            parameter: {
                key: _part(value, parameter) for key, value in saved["state"][number].items()
            }
            for name, number in self._numbers().items()
            if number in saved["state"]
            for parameter in held.get(name, ())
        }
        install(optimizer, saved["param_groups"], state)

    def _numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(n for names in self.names for n in names)}


def install(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[nn.Parameter, dict[str, Any]],
) -> None:
    """Give ``optimizer`` the saved settings of its groups and the ``state`` of its parameters."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(own)}
    counts = iter(range(len(own)))
    optimizer.load_state_dict(
        {
            "state": {numbers[id(p)]: dict(values) for p, values in state.items()},
            "param_groups": [
                {**saved, "params": [next(counts) for _ in group["params"]]}
                for group, saved in zip(optimizer.param_groups, groups, strict=True)
            ],
        }
    )
    for parameter, values in state.items():
        for key, value in values.items():
            loaded = optimizer.state[parameter].get(key)
            # torch casts state to the parameter's dtype; it is to be what it was.
            if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _update_kind_by_kind(optimizer: Optimizer) -> None:
    """Let each update see groups of one kind: torch's fused and foreach ones take no mixture.

    Tensor parallelism leaves plain parameters beside DTensors. The user's groups are put back
    after each update, so schedules and saved states see no others.
    """
    groups: list[dict[str, Any]] = []

    def before(*_: Any) -> None:
        groups[:] = optimizer.param_groups
        optimizer.param_groups[:] = [
            {**group, "params": params}
            for group in groups
            for params in _by_kind(group["params"]).values()
        ]

    def after(*_: Any) -> None:
        optimizer.param_groups[:] = groups

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _by_kind(parameters: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(mesh, []).append(parameter)
    return kinds


def _spread(name: str, value: Any, parameter: nn.Parameter) -> Any:
    if isinstance(value, Tensor) and value.is_meta:
        raise TrainingError(
            f"the optimizer keeps state of {name} from the start, but the model is on the meta "
            "device, where there are no values. Pass the optimizer as a function, or build the "
            "model on a real device."
        )
    return _part(value, parameter)


@torch.no_grad()
def _part(value: Any, parameter: nn.Parameter) -> Any:
    """``parameter``'s own part of ``value``, a piece of the state of the whole parameter."""
    if not isinstance(value, Tensor):
        return value
    if same_shape(value, parameter):
        return as_part(value, parameter)
    return value.clone()  # Adam's step, say: two copies of a tied weight must not share it
