"""What models and losses log in a step: added up here, and summed over ranks with the loss.

The sums of a step travel in one message (``wire``): loss, count, samples, and the logged values
under names that all ranks have agreed on. A rank with a new name only says that it has one, in a
field of the same message; then, and only then, the ranks exchange names, all after the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.log_values import Reduce
from paceline.parallel.tensor import plain
from paceline.sync.replica import Replica
from paceline.world.object_collectives import all_gather_object

_SUMS = 3  # loss sum, item count, samples
_FIRST = _SUMS + 1  # after the field that says that there are new names

Key = tuple[str, Reduce, bool]
"""A name, how its values become one, and whether it was logged outside of a forward pass."""


@dataclass
class _Values:
    """What this rank has logged under one name: a sum and its count, or the extreme and 1."""

    total: Any = 0.0
    count: Any = 0.0

    def add(self, value: Any, count: Any, reduce: Reduce) -> None:
        if reduce == "mean":
            self.total, self.count = self.total + value * count, self.count + count
        elif reduce == "sum":
            self.total, self.count = self.total + value, self.count + 1
        else:
            pick = torch.maximum if reduce == "max" else torch.minimum
            value = torch.as_tensor(value, dtype=torch.float64)
            self.total = pick(self.total, value.to(self.total.device)) if self.count else value
            self.count = 1.0


@dataclass(frozen=True)
class LoggedValue:
    """One name's value over all ranks, as a total and the count to divide it by."""

    total: float
    count: float
    reduce: Reduce

    @property
    def value(self) -> float:
        """The number to report."""
        if self.reduce == "mean":
            return self.total / self.count if self.count else math.nan
        return self.total

    def joined(self, other: LoggedValue) -> LoggedValue:
        """This and a later value of the same name as one."""
        if self.reduce in ("mean", "sum"):
            return LoggedValue(self.total + other.total, self.count + other.count, self.reduce)
        pick = max if self.reduce == "max" else min
        return LoggedValue(pick(self.total, other.total), 1.0, self.reduce)


LoggedByName = dict[str, LoggedValue]


@dataclass
class StepLog:
    """What was logged for one step, over all ranks; complete once new names are agreed on."""

    keys: list[Key]
    world_size: int
    fields: Callable[[], list[float]]
    """Reads what came back in the step's message beside the sums."""
    new: dict[Key, LoggedValue] = field(default_factory=dict)
    """What was under names that no rank had used before."""

    @property
    def has_new_names(self) -> bool:
        """Whether any rank has logged under a name that the others did not know."""
        return self.fields()[0] > 0

    def values(self, *, late: bool = False) -> LoggedByName:
        """By name; ``late``: what was logged between the step before and this one."""
        found = {key: value for key, value in self.new.items() if key[2] == late}
        fields = self.fields()[1:] if self.keys else []
        for key in self.keys:
            width = _width(key, self.world_size)
            own, fields = fields[:width], fields[width:]
            if (value := _read(key, own)) is not None and key[2] == late:
                found[key] = value
        return {key[0]: value for key, value in found.items()}


class StepLogs:
    """Takes what is logged on this rank, and makes one value of all ranks' of it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._keys: list[Key] = []
        self._own: dict[Key, _Values] = {}
        self._evaluated: dict[Key, _Values] | None = None
        self._last_evaluated: dict[Key, _Values] = {}
        self._unseen: tuple[StepLog, dict[Key, _Values]] | None = None

    def add(self, name: str, value: Any, count: Any, reduce: Reduce) -> None:
        """One value from a forward pass; of ranks that split a layer, one speaks for all."""
        value, count = plain((value, count))  # a collective of those ranks, where it is split
        if self._replica.layout.coordinate(self._replica.world.rank).tp == 0:
            own = self._own if self._evaluated is None else self._evaluated
            own.setdefault((name, reduce, False), _Values()).add(
                self._number(value), self._number(count), reduce
            )

    def add_outside(self, name: str, value: Any, count: Any, reduce: Reduce) -> None:
        """One value from a callback or a loop: reported with the step that was done last."""
        own = self._own.setdefault((name, reduce, True), _Values())
        own.add(self._number(value), self._number(1 if count is None else count), reduce)

    def _number(self, value: Any) -> Any:
        """As float64, on the device that it is on: reading it would make a GPU's host wait."""
        return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)

    # ------------------------------------------------------------------ in a step

    def begin(self) -> None:
        """A step begins: what one that failed has logged is dropped."""
        self._own = {key: values for key, values in self._own.items() if key[2]}

    def pack(self, sums: Tensor) -> tuple[Tensor, list[Key]]:
        """``sums`` with what was logged behind them, to be summed over the ranks; and its keys."""
        keys, size = list(self._keys), self._replica.world.size
        widths = [_width(key, size) for key in keys]
        wire = torch.zeros(_FIRST + sum(widths), dtype=torch.float64, device=sums.device)
        wire[:_SUMS] = sums
        at = _FIRST
        for key, width in zip(keys, widths, strict=True):
            if (own := self._own.pop(key, None)) is not None:
                shift = 0 if width == 2 else 2 * self._replica.world.rank
                _put(wire[at + shift], own.total)
                _put(wire[at + shift + 1], own.count)
            at += width
        if self._own:
            wire[_SUMS].fill_(1.0)
        return wire, keys

    def end(self, keys: list[Key], fields: Callable[[], list[float]]) -> StepLog:
        """The step's log, whose message was summed. On a GPU new names are agreed on later."""
        log = StepLog(keys, self._replica.world.size, fields)
        self._unseen, self._own = (log, self._own), {}
        if self._replica.device.type == "cpu":
            self.settle()
        return log

    def settle(self) -> None:
        """Where a rank has logged under a new name, let all know it. A collective then."""
        unseen, self._unseen = self._unseen, None
        if unseen is None or not unseen[0].has_new_names:
            return
        log, own = unseen
        log.new = self._gathered(own)
        self._keys = sorted({*self._keys, *log.new})

    # ------------------------------------------------------------------ between steps

    def flush(self) -> LoggedByName:
        """What has been logged since the last step, over all ranks. A collective."""
        self.settle()
        own, self._own = self._own, {}
        return {key[0]: value for key, value in self._gathered(own).items()}

    def begin_evaluation(self) -> None:
        """What is logged from now on belongs to an evaluation."""
        self._evaluated = self._last_evaluated = {}

    def end_evaluation(self) -> None:
        """What is logged belongs to steps again."""
        self._evaluated = None

    def evaluated(self) -> LoggedByName:
        """What the last evaluation has logged, over all ranks. A collective."""
        found = self._gathered(self._last_evaluated)
        return {key[0]: value for key, value in found.items()}

    def _gathered(self, own: dict[Key, _Values]) -> dict[Key, LoggedValue]:
        numbers = {key: (float(v.total), float(v.count)) for key, v in own.items()}
        found: dict[Key, LoggedValue] = {}
        for each in all_gather_object(numbers, self._replica.world.everyone):
            for key, (total, count) in each.items():
                value = LoggedValue(total, count, key[1])
                found[key] = found[key].joined(value) if key in found else value
        return found


def _width(key: Key, world_size: int) -> int:
    """Fields in the message: a sum and a count; or these of each rank, where sums do not do."""
    return 2 if key[1] in ("mean", "sum") else 2 * world_size


def _read(key: Key, fields: list[float]) -> LoggedValue | None:
    if len(fields) == 2 and key[1] in ("mean", "sum"):
        return LoggedValue(fields[0], fields[1], key[1]) if fields[1] else None
    there = [fields[i] for i in range(0, len(fields), 2) if fields[i + 1]]
    if not there:
        return None
    return LoggedValue(max(there) if key[1] == "max" else min(there), 1.0, key[1])


def _put(place: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        place.copy_(value, non_blocking=True)
    else:
        place.fill_(value)  # plain assignment would make the host wait for a GPU
