"""What an engine saves: the whole model's state, whatever the layout, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.engine.checks import another_model, check_optimizer_state
from paceline.engine.context import StepContext
from paceline.engine.randomness import restore_randomness, saved_randomness
from paceline.engine.whole_model import WholeModel
from paceline.parallel.distributed_model import stage_group
from paceline.parallel.dtensor import local, part_of, whole
from paceline.world import collectives


class WholeState:
    """Saves and loads for one engine; ``whole`` is from before the model was spread."""

    def __init__(self, context: StepContext, whole: WholeModel) -> None:
        self._context, self._replica, self._whole = context, context.replica, whole

    def save(self) -> dict[str, Any]:
        """Everything, as one process would have it. Called by every rank."""
        context, scaler = self._context, self._context.precision.scaler
        return {
            "step": self._replica.steps_done,
            "model": self.model(),
            "optimizer": self._optimizer(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": context.learning_rate.state_dict(),
            "randomness": saved_randomness(self._replica),
            **context.sync.state.whole(self._merged_whole),
            **({} if context.average is None else {"ema": self.averages()}),
        }

    def model(self) -> dict[str, Any]:
        """The whole model's parameters and persistent buffers, by name."""
        if self._replica.holds_whole_model:
            return self._replica.model.state_dict()
        parameters = self.parameters()
        buffers = self.buffers()
        found: dict[str, Any] = {}
        for name in self._whole.saved:
            found[name] = parameters[name] if name in parameters else buffers[name]
        return found

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, under all of its names. Called by every rank."""
        return self._all_names({name: own[0] for name, own in self._replica.held.items()})

    def averages(self) -> dict[str, Tensor]:
        """The average of every parameter that has one, whole, by first name. A collective."""
        average = self._context.kept_average()
        average.check_not_in_place("state_dict")
        found = {name: average.of(name) for name in self._replica.held}
        return self._merged(_whole({name: own[0] for name, own in found.items() if own}))

    def averaged_parameters(self) -> dict[str, Tensor]:
        """As ``parameters``, with the average of each one that has one."""
        return self.parameters() | self._all_names(self.averages())

    def gradients(self) -> dict[str, Tensor]:
        """Every trained parameter's gradient, whole, zero where there is none, by first name."""
        own = {
            name: parameters[0].grad
            if parameters[0].grad is not None
            else torch.zeros_like(parameters[0])
            for name, parameters in self._replica.held.items()
            if parameters[0].requires_grad
        }
        return self._merged(_whole(own))

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer by name, whichever stage has it. Called by every rank."""
        named = self._replica.model.named_buffers(remove_duplicate=False)
        return self._merged(_whole({n: b for n, b in named if not b.is_meta}))

    def _merged_whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of this rank's parameters by name, whole, with those of other stages."""
        return self._merged(_whole(own))

    def _all_names(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found, names = self._merged(_whole(own)), self._whole.first_saved
        return found | {name: found[first] for name, first in names.items() if first in found}

    def _merged(self, own: dict[str, Any]) -> dict[str, Any]:
        """What this rank has, with what other pipeline stages have."""
        replica = self._replica
        if replica.layout.pp == 1 or not replica.is_spread:
            return own
        group = stage_group(replica.world, replica.layout)
        merged: dict[str, Any] = {}
        for part in collectives.all_gather_object(own, group=group):
            for name, value in part.items():
                merged.setdefault(name, value)
        return merged

    def _optimizer(self) -> dict[str, Any]:
        optimizer, groups = self._context.optimizer, self._context.groups
        if self._replica.holds_whole_model:
            return optimizer.state_dict()
        own = groups.state(optimizer, self._replica.spread.held)
        return groups.state_dict(optimizer, self._merged(own))

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what ``save`` gave, at this or another layout."""
        context, optimizer = self._context, self._context.optimizer
        scaler = context.precision.scaler
        if self._replica.holds_whole_model:
            try:
                self._replica.model.load_state_dict(state["model"])
            except RuntimeError as error:
                raise another_model(str(error)) from error
            check_optimizer_state(state["optimizer"], optimizer)
            optimizer.load_state_dict(state["optimizer"])
        else:
            self._load_model(state["model"])
            sizes = [len(names) for names in context.groups.names]
            check_optimizer_state(state["optimizer"], optimizer, sizes)
            context.groups.load(optimizer, self._replica.spread.held, state["optimizer"])
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        context.learning_rate.load_state_dict(state["schedule"])
        restore_randomness(self._replica, state.get("randomness"))
        context.sync.state.load_whole(state)
        self._replica.steps_done = state["step"]
        if context.average is not None:
            context.average.take_whole(state.get("ema") or {})
        context.sync.model_replaced()

    @torch.no_grad()
    def _load_model(self, saved: Mapping[str, Any]) -> None:
        self._check_model(saved)
        spread = self._replica.spread
        for name, parameters in spread.held.items():
            for parameter in parameters:
                own = local(parameter)
                own.copy_(part_of(saved[name], parameter))
        for name, buffer in spread.model.named_buffers(remove_duplicate=False):
            if name in saved and not buffer.is_meta:
                buffer.copy_(saved[name])

    def _check_model(self, saved: Mapping[str, Any]) -> None:
        shapes = self._whole.saved
        tensors = {n: tuple(v.shape) for n, v in saved.items() if isinstance(v, Tensor)}
        problems = []
        if missing := sorted(shapes.keys() - tensors.keys()):
            problems.append(f"it lacks {', '.join(missing[:5])}")
        if unknown := sorted(tensors.keys() - shapes.keys()):
            problems.append(f"this model has no {', '.join(unknown[:5])}")
        for name, shape in shapes.items():
            if name in tensors and tensors[name] != shape:
                problems.append(f"{name} has shape {tensors[name]} there and {shape} here")
        if problems:
            raise another_model("; ".join(problems) + ".")


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor).cpu().clone() for name, tensor in tensors.items()}
