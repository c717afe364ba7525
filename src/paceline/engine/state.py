"""What an engine saves: the whole model's state, whatever the layout, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.engine.checks import another_model, check_optimizer_state, load_schedule
from paceline.engine.repoint import Held
from paceline.engine.wire_parts import WireParts
from paceline.parallel.dtensor import local, part_of, whole
from paceline.parallel.spread import stage_group
from paceline.world import collectives

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class State:
    """Saves and loads for one engine; knows the whole model's tensors from before the spreading."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wire = WireParts(engine)
        saved = engine.model.state_dict(keep_vars=True)
        self._shapes = {
            name: tuple(value.shape) for name, value in saved.items() if isinstance(value, Tensor)
        }
        # Names of one tensor: a tied weight is kept under its first name by who spreads it.
        first: dict[int, str] = {}
        self._first = {
            name: first.setdefault(id(value), name)
            for name, value in saved.items()
            if isinstance(value, nn.Parameter)
        }

    def save(self) -> dict[str, Any]:
        """Everything, as one process would have it. Called by every rank."""
        engine = self._engine
        schedule, scaler = engine.options["schedule"], engine._precision.scaler
        return {
            "step": engine.steps_done,
            "model": self.model(),
            "optimizer": self._optimizer(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": schedule.state_dict() if isinstance(schedule, LRScheduler) else None,
            "compress": self._wire.whole(),
            "reduction": engine.reducing.state(),
        }

    def model(self) -> dict[str, Any]:
        """The whole model's parameters and persistent buffers, by name."""
        engine = self._engine
        if self._is_plain:
            return engine.model.state_dict()
        parameters = self.parameters()
        buffers = self.buffers()
        found: dict[str, Any] = {}
        for name in self._shapes:
            found[name] = parameters[name] if name in parameters else buffers[name]
        return found

    @property
    def _is_plain(self) -> bool:
        spread = self._engine._spread
        return spread is None or spread.is_plain

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, under all of its names. Called by every rank."""
        return self._all_names({name: own[0] for name, own in self.held.items()})

    @property
    def held(self) -> Held:
        """What this rank holds by name; the whole model before it is spread."""
        engine = self._engine
        if engine._spread is not None:
            return engine._spread.held
        return {name: [parameter] for name, parameter in engine.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Every trained parameter's gradient, whole, zero where there is none, by first name."""
        own = {
            name: parameters[0].grad
            if parameters[0].grad is not None
            else torch.zeros_like(parameters[0])
            for name, parameters in self.held.items()
            if parameters[0].requires_grad
        }
        return self._merged(_whole(own))

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer by name, whichever stage has it. Called by every rank."""
        named = self._engine.model.named_buffers(remove_duplicate=False)
        return self._merged(_whole({n: b for n, b in named if not b.is_meta}))

    def merged_whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of this rank's parameters by name, whole, with those of other stages."""
        return self._merged(_whole(own))

    def _all_names(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self._merged(_whole(own))
        return found | {name: found[first] for name, first in self._first.items() if first in found}

    def _merged(self, own: dict[str, Any]) -> dict[str, Any]:
        """What this rank has, with what other pipeline stages have."""
        engine = self._engine
        if engine.layout.pp == 1 or engine._spread is None:
            return own
        group = stage_group(engine.world, engine.layout)
        merged: dict[str, Any] = {}
        for part in collectives.all_gather_object(own, group=group):
            for name, value in part.items():
                merged.setdefault(name, value)
        return merged

    def _optimizer(self) -> dict[str, Any]:
        engine = self._engine
        if self._is_plain:
            return engine.optimizer.state_dict()
        own = engine._groups.state(engine.optimizer, engine.spread.held)
        return engine._groups.state_dict(engine.optimizer, self._merged(own))

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`save` gave, at this or another layout."""
        engine = self._engine
        if self._is_plain:
            try:
                engine.model.load_state_dict(state["model"])
            except RuntimeError as error:
                raise another_model(str(error)) from error
            check_optimizer_state(state["optimizer"], engine.optimizer)
            engine.optimizer.load_state_dict(state["optimizer"])
        else:
            self._load_model(state["model"])
            sizes = [len(names) for names in engine._groups.names]
            check_optimizer_state(state["optimizer"], engine.optimizer, sizes)
            engine._groups.load(engine.optimizer, engine.spread.held, state["optimizer"])
        schedule, scaler = engine.options["schedule"], engine._precision.scaler
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        if isinstance(schedule, LRScheduler) and state["schedule"] is not None:
            load_schedule(schedule, state["schedule"])
        self._wire.take_whole(state.get("compress"))
        engine.reducing.take(state.get("reduction"))
        engine.steps_done = state["step"]

    @torch.no_grad()
    def _load_model(self, saved: Mapping[str, Any]) -> None:
        self._check_model(saved)
        spread = self._engine.spread
        for name, parameters in spread.held.items():
            for parameter in parameters:
                own = local(parameter)
                own.copy_(part_of(saved[name], parameter))
        for name, buffer in spread.model.named_buffers(remove_duplicate=False):
            if name in saved and not buffer.is_meta:
                buffer.copy_(saved[name])

    def _check_model(self, saved: Mapping[str, Any]) -> None:
        tensors = {n: tuple(v.shape) for n, v in saved.items() if isinstance(v, Tensor)}
        problems = []
        if missing := sorted(self._shapes.keys() - tensors.keys()):
            problems.append(f"it lacks {', '.join(missing[:5])}")
        if unknown := sorted(tensors.keys() - self._shapes.keys()):
            problems.append(f"this model has no {', '.join(unknown[:5])}")
        for name, shape in self._shapes.items():
            if name in tensors and tensors[name] != shape:
                problems.append(f"{name} has shape {tensors[name]} there and {shape} here")
        if problems:
            raise another_model("; ".join(problems) + ".")


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor).cpu().clone() for name, tensor in tensors.items()}
