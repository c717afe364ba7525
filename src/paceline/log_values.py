"""``paceline.log``: a number from inside a model or a loss, on its way to whoever runs the model.

An engine opens a recording around each forward pass of its model; what is logged inside goes to
it. Elsewhere (a model that is called by hand, a recomputation, a placeholder) logging does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from paceline.errors import TrainingError

Reduce = Literal["mean", "sum", "max", "min"]
REDUCTIONS = ("mean", "sum", "max", "min")


class LogSink(Protocol):
    """What takes logged values."""

    def add(self, name: str, value: Any, count: Any, reduce: Reduce) -> None:
        """One more value of ``name``, which stands for ``count`` items."""


@dataclass
class Recording:
    """Where values go at the moment; nowhere while it is not ``open``."""

    sink: LogSink | None
    items: int
    """For how many items a value stands unless it says so."""
    open: bool = True
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around what logging computes: a pipeline counts what its model computes."""


_current: ContextVar[Recording | None] = ContextVar("paceline-log", default=None)


def current() -> Recording | None:
    """The recording that is open here, if one is."""
    recording = _current.get()
    return recording if recording is not None and recording.open else None


@contextlib.contextmanager
def recording(sink: LogSink | None, items: int) -> Iterator[None]:
    """What is logged inside goes to ``sink``, by default as a mean over ``items``."""
    token = _current.set(Recording(sink, items) if items else None)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def closed() -> Iterator[Recording | None]:
    """Nothing is logged inside until the recording that it gives is opened."""
    outer = _current.get()
    inner = None if outer is None else Recording(outer.sink, outer.items, open=False)
    token = _current.set(inner)
    try:
        yield inner
    finally:
        _current.reset(token)


def log(
    name: str, value: Any, *, count: int | torch.Tensor | None = None, reduce: Reduce = "mean"
) -> None:
    """Log a number from inside a model or a loss: the run reports it beside the loss.

        paceline.log("kl", kl.mean())

    Values of the microbatches and ranks of a step become one: the ``"mean"`` weighted by
    ``count``, or the ``"sum"``, ``"max"`` or ``"min"``. It costs no communication of its own. From
    callbacks and loops call ``trainer.log`` or ``engine.log``. Where no engine runs the model,
    nothing happens.

    Args:
        name: under which it is reported.
        value: a number, or a tensor with one element.
        count: over how many items the value is a mean; by default as many as the loss is.
        reduce: how values become one.
    """
    check_logged(name, value, reduce)
    now = current()
    if now is not None and now.sink is not None:
        with now.apart():
            now.sink.add(name, value, now.items if count is None else count, reduce)


def check_logged(name: Any, value: Any, reduce: Any) -> None:
    """Refuse what cannot be logged as a number."""
    if not isinstance(name, str) or not name:
        raise TrainingError(f"log: name={name!r} must be text.")
    if reduce not in REDUCTIONS:
        raise TrainingError(
            f"log({name!r}): reduce={reduce!r} must be one of {', '.join(REDUCTIONS)}."
        )
    is_tensor = isinstance(value, torch.Tensor)
    if not (is_tensor and value.numel() == 1) and not isinstance(value, int | float):
        found = f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise TrainingError(
            f"log({name!r}): the value is {found}, not one number. Log its mean, or one number "
            "of it."
        )
