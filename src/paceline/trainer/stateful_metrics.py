"""Metrics with a state of their own, such as those of torchmetrics, right over all ranks.

Each rank updates its metric with its own samples. At the end the states of all ranks are put
together, as each state's own reduction says, and one rank computes the value for all of them.

Torchmetrics could synchronise by itself, but gathers one tensor after another: ranks with another
number of batches, or with none (the other stages of a pipeline), would wait forever or spoil the
mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.nested import map_tensors, tensors
from paceline.world import collectives

State = dict[str, Any]

_SYNCS = "distributed_available_fn"
"""What torchmetrics asks whether there are other ranks; there are none that would answer."""


def has_state(metric: Any) -> bool:
    """Whether a metric is updated batch by batch and computed at the end."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class StatefulMetric:
    """One metric during one evaluation."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name, self._metric = name, metric
        self._updated = False
        metric.reset()

    def update(self, output: Any, target: Any) -> None:
        """Take in one batch of this rank."""
        if not self._updated and isinstance(self._metric, nn.Module):
            for tensor in itertools.islice(tensors(output), 1):
                self._metric.to(tensor.device)
        self._updated = True
        try:
            self._metric.update(output, target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(
                f"metric {self.name!r} ({type(self._metric).__name__}) cannot take the model's "
                f"output and the target of a batch: {error}. Write a function metric(output, "
                "target) that prepares them."
            ) from error

    def compute(self, rank: int, ranks: int) -> dict[str, float]:
        """The values over all samples of all ``ranks``, of which this is ``rank``.

        Called by every rank.
        """
        if ranks == 1:
            return _numbers(self.name, self._metric.compute())
        parts = self._parts()
        own = [_state(part) for part in parts] if self._updated else None
        everyone = collectives.all_gather_object(own)
        having = [at for at, states in enumerate(everyone) if states is not None]
        if not having:
            return {}
        result: dict[str, float] | TrainingError = {}
        if rank == having[0]:
            try:
                result = self._computed(parts, [everyone[at] for at in having])
            except TrainingError as error:  # for all ranks to raise
                result = error
            except Exception as error:
                result = TrainingError(
                    f"metric {self.name!r} ({type(self._metric).__name__}) could not be computed "
                    f"from the states of {len(having)} ranks: {type(error).__name__}: {error}"
                )
        return _raised(collectives.all_gather_object(result)[having[0]])

    def _parts(self) -> list[Any]:
        """The metrics of torchmetrics that this one is made of: itself, or those it wraps."""
        metric = self._metric
        if hasattr(metric, "compute_groups"):
            list(metric.items())  # a collection updates one metric of several that are alike
        modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
        found = [module for module in modules if _reductions(module) is not None]
        if not found:
            raise TrainingError(
                f"metric {self.name!r} ({type(metric).__name__}) keeps a state that only metrics "
                "of torchmetrics can put together over several ranks. Derive it from "
                "torchmetrics.Metric, or use paceline.WholeSet(function)."
            )
        return found

    def _computed(self, parts: list[Any], everyone: list[list[State]]) -> dict[str, float]:
        before = [
            {name: getattr(part, name) for name in (_SYNCS, *(_reductions(part) or ()))}
            for part in parts
        ]
        try:
            for part, *states in zip(parts, *everyone, strict=True):
                setattr(part, _SYNCS, lambda: False)
                for name, value in _merged(part, states).items():
                    setattr(part, name, value)
            return _numbers(self.name, self._metric.compute())
        finally:
            for part, own in zip(parts, before, strict=True):
                for name, value in own.items():
                    setattr(part, name, value)


def _reductions(part: Any) -> Mapping[str, Any] | None:
    """How the states of a metric are put together, by name: private to torchmetrics, as of 1.9."""
    found = getattr(part, "_reductions", None)
    return found if isinstance(found, Mapping) else None


def _state(part: Any) -> State:
    return {
        name: map_tensors(getattr(part, name), lambda tensor: tensor.detach().cpu())
        for name in _reductions(part) or ()
    }


def _merged(part: Any, states: list[State]) -> State:
    """The states of several ranks as one, on the device of ``part``."""
    merged: State = {}
    for name, reduce in (_reductions(part) or {}).items():
        values: Any = [state[name] for state in states]
        if all(isinstance(value, list) for value in values):
            values = [item for value in values for item in value]
        elif all(isinstance(value, Tensor) for value in values):
            values = torch.stack(values)
        values = map_tensors(values, lambda tensor: tensor.to(part.device))
        empty = isinstance(values, list) and not values
        merged[name] = values if reduce is None or empty else reduce(values)
    return merged


def _raised(result: Any) -> dict[str, float]:
    if isinstance(result, TrainingError):
        raise result
    return dict(result)


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):  # a collection of metrics, or one value for each class
        return {f"{name}/{key}": _number(f"{name}/{key}", one) for key, one in value.items()}
    return {name: _number(name, value)}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TrainingError(
            f"metric {name!r} gave {value.numel()} values, not one. Choose an average (such as "
            "average='macro'), or wrap it in torchmetrics.ClasswiseWrapper."
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TrainingError(
            f"metric {name!r} gave a {type(value).__name__}, not a number."
        ) from None
