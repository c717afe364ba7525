"""Which parameters are trained at which step: ``freeze`` and ``unfreeze_at``."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from torch import nn

from paceline.engine.checks import names_like
from paceline.errors import TrainingError
from paceline.options import EngineOptions

_TOLD = 3


class Freezing:
    """Freezes parameters of a model by name, and has others trained from a step on.

    Made with the whole model, before it is spread; it changes nothing by itself. What is trained
    follows from the number of steps done alone, so that a resume needs no state of it.
    """

    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        self._model = model
        names = [name for name, _ in model.named_parameters()]
        self._frozen = set(_matched(model, names, options.freeze or (), "freeze"))
        self._from_step: dict[str, int] = {}  # by name: from when on it is trained
        for pattern, step in (options.unfreeze_at or {}).items():
            matched = _matched(model, names, [pattern], "unfreeze_at")
            self._check_can_be_trained(matched)
            for name in matched:
                self._from_step[name] = min(step, self._from_step.get(name, step))
        self._steps = sorted({*self._from_step.values()})
        self._reached = 0  # how many of these steps
        self._notes: list[str] = []

    def _check_can_be_trained(self, names: Sequence[str]) -> None:
        for name in names:
            parameter = self._model.get_parameter(name)
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise TrainingError(
                    f"unfreeze_at: {name} is {str(parameter.dtype).removeprefix('torch.')}, of "
                    "which there is no gradient. Name other parameters."
                )

    def begin(self) -> None:
        """Freeze what is frozen at the start."""
        for name, parameter in self._model.named_parameters():
            if name in self._frozen or name in self._from_step:
                parameter.requires_grad_(False)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained at some time, in the order of the model."""
        return [
            parameter
            for name, parameter in self._model.named_parameters()
            if name in self._from_step or (parameter.requires_grad and name not in self._frozen)
        ]

    def check_are_held(self, held: Sequence[nn.Parameter]) -> None:
        """Refuse an optimizer over ``held`` that lacks what is to be trained later."""
        known = {id(parameter) for parameter in held}
        for name, step in self._from_step.items():
            if id(self._model.get_parameter(name)) not in known:
                raise TrainingError(
                    f"unfreeze_at: {name} is to be trained from step {step} on, and is not among "
                    "the optimizer's parameters. Make the optimizer from model.parameters(), or "
                    "pass a function that makes it; what is frozen is left alone."
                )

    def follow(self, held: Mapping[str, Sequence[nn.Parameter]], steps_done: int) -> None:
        """Have the parameters in ``held`` trained, or not, as after so many steps."""
        reached = sum(step <= steps_done for step in self._steps)
        if reached == self._reached:
            return
        self._reached = reached
        for name, step in self._from_step.items():
            for parameter in held.get(name, ()):
                parameter.requires_grad_(step <= steps_done)
        trained = [name for name, step in self._from_step.items() if step <= steps_done]
        if trained:
            more = f" and {len(trained) - _TOLD} more" if len(trained) > _TOLD else ""
            told = ", ".join(trained[:_TOLD]) + more
            self._notes.append(f"unfreeze_at: after step {steps_done}, {told} are trained")

    def take_notes(self) -> list[str]:
        """What was unfrozen, to tell the user, since this was last asked."""
        notes, self._notes = self._notes, []
        return notes


def _matched(
    model: nn.Module, names: Sequence[str], patterns: Sequence[str], option: str
) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise TrainingError(
                f"{option}: {pattern!r} matches no parameter of {type(model).__name__}. "
                f"{names_like(pattern, model, list(names))}"
            )
        found.update(dict.fromkeys(matched))
    return list(found)
