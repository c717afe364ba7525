"""What a job may change in its rank, put back after it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from paceline.world import rng_state, set_rng_state


class ProcessSnapshot:
    """The state of this process that jobs commonly change; ``restore`` puts it back."""

    def __init__(self) -> None:
        self._values = [(restore, read()) for read, restore in _STATE]
        self._threads = set(threading.enumerate())

    def restore(self) -> None:
        """Put everything back."""
        for restore, value in self._values:
            restore(value)

    def new_threads(self) -> list[str]:
        """Threads that started since and still run: they cannot be put back."""
        started = set(threading.enumerate()) - self._threads
        return [thread.name for thread in started if thread.is_alive()]


def _signals() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signals(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _set_environ(values: dict[str, str]) -> None:
    if dict(os.environ) != values:
        os.environ.clear()
        os.environ.update(values)


def _logging() -> tuple[int, list[logging.Handler]]:
    root = logging.getLogger()
    return root.level, root.handlers[:]


def _set_logging(state: tuple[int, list[logging.Handler]]) -> None:
    root = logging.getLogger()
    root.setLevel(state[0])
    root.handlers[:] = state[1]


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_in_place(target: list[Any]) -> Callable[[list[Any]], None]:
    def restore(values: list[Any]) -> None:
        target[:] = values

    return restore


def _set_default_device(device: torch.device) -> None:
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


def _streams() -> tuple[Any, Any]:
    return sys.stdout, sys.stderr


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


_STATE: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: dict(os.environ), _set_environ),
    (os.getcwd, os.chdir),
    (lambda: sys.path[:], _set_in_place(sys.path)),
    (lambda: sys.argv[:], _set_in_place(sys.argv)),
    (lambda: warnings.filters[:], _set_in_place(warnings.filters)),  # type: ignore[arg-type]
    (_signals, _set_signals),
    (_logging, _set_logging),
    (_streams, _set_streams),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, lambda on: torch.set_grad_enabled(on)),
    (torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on)),
    (
        _deterministic,
        lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (rng_state, set_rng_state),
]
