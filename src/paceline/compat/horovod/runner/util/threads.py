"""Threads, as ``horovod.runner.util.threads`` starts them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call ``target(*args)`` in a thread that has been started; ``silent``: errors are dropped."""
    if not isinstance(args, tuple | list):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}; for one: (arg,)")

    def work() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=work, name=name, daemon=daemon)
    thread.start()
    return thread
