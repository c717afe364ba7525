"""Averaged weights: an exponential moving average of the trained parameters.

Each rank averages what it holds, in the form in which it holds it: a part of a parameter where the
layout cuts it. No rank talks to another for it. Frozen parameters have no average, since they are
their own; buffers (such as the statistics of batch norm) are those of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.options import EMA
from paceline.parallel.dtensor import as_part, local
from paceline.sync.replica import Replica
from paceline.torch_internals import move_all_towards

Held = Mapping[str, Sequence[nn.Parameter]]


class AveragedWeights:
    """The average of one engine's parameters, as far as this rank holds them.

    Until it begins (``EMA.start``) the average is the model itself.
    """

    def __init__(self, options: EMA, replica: Replica) -> None:
        self.options = options
        self._replica = replica
        self._averages: dict[str, list[Tensor]] = {}
        """By name: one for each copy that this rank holds, as in ``Replica.held``."""
        self._aside: dict[str, list[Tensor]] = {}
        """The model's own values while the averages are in place, where dtypes differ."""
        self._is_in_place = False
        self._is_complete = False
        self._notes: list[str] = []

    @property
    def has_begun(self) -> bool:
        """Whether there is an average that may differ from the model."""
        return bool(self._averages)

    def take_notes(self) -> list[str]:
        """What there is to tell the user since this was last asked."""
        notes, self._notes = self._notes, []
        return notes

    # ------------------------------------------------------------------ training

    @torch.no_grad()
    def before_update(self, *, frozen_changed: bool) -> None:
        """Begin the average of what is trained and has none: with the values of now."""
        if self._replica.steps_done < self.options.start:
            return
        if self._is_complete and not frozen_changed:
            return
        for name, copies in self._replica.held.items():
            if name not in self._averages and copies[0].requires_grad:
                self._averages[name] = [
                    copy.detach().to(average_dtype(copy), copy=True) for copy in copies
                ]
        self._is_complete = True

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the average, where that is due after the step just done."""
        if not self._averages or not self.options.moves_after(self._replica.steps_done):
            return
        weight = 1 - self.options.decay
        averages, values = [], []
        for average, parameter in self._pairs():
            if average.dtype != parameter.dtype:
                average.lerp_(parameter.to(average.dtype), weight)
            else:
                averages.append(average)
                values.append(parameter)
        if averages:
            move_all_towards(averages, values, weight)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each average with its parameter, as far as they are on this rank."""
        held = self._replica.held
        for name, averages in self._averages.items():
            for average, parameter in zip(averages, held[name], strict=True):
                yield local(average), local(parameter.detach())

    # ------------------------------------------------------------------ using it

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights; afterwards with its own again, to the bit.

        Takes the memory of one parameter more, unless the model is in half precision: then that of
        the model.
        """
        if self._is_in_place:
            yield
            return
        self._exchange()
        self._is_in_place = True
        try:
            yield
        finally:
            self._exchange()
            self._is_in_place = False

    @torch.no_grad()
    def _exchange(self) -> None:
        if self._replica.is_spread:
            self._replica.spread.let_go()  # of what was gathered of the values before
        held = self._replica.held
        for name, averages in self._averages.items():
            if averages[0].dtype == held[name][0].dtype:
                for average, parameter in zip(averages, held[name], strict=True):
                    own, other = local(parameter.detach()), local(average)
                    kept = own.clone()
                    own.copy_(other)
                    other.copy_(kept)
            elif self._is_in_place:
                for own, parameter in zip(self._aside.pop(name), held[name], strict=True):
                    local(parameter.detach()).copy_(local(own))
            else:
                self._aside[name] = [parameter.detach().clone() for parameter in held[name]]
                for average, parameter in zip(averages, held[name], strict=True):
                    local(parameter.detach()).copy_(local(average))

    def check_not_in_place(self, what: str) -> None:
        """Raise where the model's values are those of the average, for want of the others."""
        if self._is_in_place:
            raise TrainingError(
                f"{what}: the model has its averaged weights, by evaluating(weights='ema'). Leave "
                "that block first."
            )

    # ------------------------------------------------------------------ spreading and saving

    def spread(self, held: Held) -> None:
        """The model was spread: keep of the averages what this rank holds of it."""
        for kept in (self._averages, self._aside):
            for name in list(kept):
                whole = kept.pop(name)[0]
                if name in held:
                    kept[name] = [as_part(whole, copy.detach()) for copy in held[name]]

    def of(self, name: str) -> list[Tensor] | None:
        """The averages of a parameter, one for each copy on this rank; ``None``: it has none."""
        return self._averages.get(name)

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept for it."""
        for kept in (self._averages, self._aside):
            for copies in kept.values():
                yield from copies

    @torch.no_grad()
    def take(self, averages: Mapping[str, Sequence[Tensor]]) -> None:
        """Go on from these, parts as this rank holds them; without any, begin again."""
        # A model from the meta device is loaded when the first batch has spread it: that may be in
        # an evaluation which has asked for the average that only now is there.
        is_awaited = self._is_in_place and not self._averages
        if not is_awaited:
            self.check_not_in_place("load")
        held = self._replica.held
        self._averages = {
            name: [own.to(average_dtype(held[name][0])) for own in copies]
            for name, copies in averages.items()
        }
        self._is_complete = False
        if is_awaited:
            self._is_in_place = False
            self._exchange()
            self._is_in_place = True

    def begin_late(self, step: int) -> None:
        """A run was resumed at ``step`` from a checkpoint without averaged weights."""
        if step > self.options.start:
            self._notes.append(
                f"the checkpoint of step {step} has no averaged weights (ema): the average begins "
                "with its weights"
            )

    def take_whole(self, averages: Mapping[str, Tensor]) -> None:
        """Go on from these, whole tensors by name."""
        self.take(
            {
                name: [as_part(averages[name], copy.detach()) for copy in copies]
                for name, copies in self._replica.held.items()
                if name in averages
            }
        )


def average_dtype(parameter: Tensor) -> torch.dtype:
    """What a parameter is averaged in: steps towards it would vanish in half precision."""
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half else parameter.dtype
