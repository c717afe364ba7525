"""Sending a test's function to a rank that has not imported the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle


def pickle_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """``(function, arguments)`` as bytes a rank can load.

    Functions and classes of test modules, ``conftest.py`` and ``__main__`` travel by value, since
    a rank cannot import those; everything else travels by name and is imported there.
    """
    if not callable(function):
        raise TypeError(f"run takes a function, not a {type(function).__name__}.")
    with _by_value(_local_modules(function)):
        try:
            return cloudpickle.dumps((function, arguments))
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"{name} and its arguments cannot be sent to a rank: {type(error).__name__}: "
                f"{error}. Make what cannot be pickled (locks, files, fixtures) inside the function."
            ) from error


def _local_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """The loaded modules that ranks cannot import under their name."""
    names = [name for name in list(sys.modules) if _is_test_module(name.rpartition(".")[2])]
    own = getattr(function, "__module__", None)
    if own in sys.modules and not _is_installed(own):
        names.append(own)
    return [sys.modules[name] for name in names if isinstance(sys.modules[name], ModuleType)]


def _is_test_module(name: str) -> bool:
    return name.startswith("test_") or name.endswith("_test") or name == "conftest"


def _is_installed(name: str) -> bool:
    """Part of a package, or of what was built in: a rank imports it as this process did."""
    module = sys.modules[name]
    return "." in name or hasattr(module, "__path__") or not getattr(module, "__file__", None)


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    registered = []
    already = cloudpickle.list_registry_pickle_by_value()
    for module in modules:
        if module.__name__ not in already:
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
