"""Sending a test's function to a rank that has not imported the test."""

from __future__ import annotations

import functools
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
                f"{error}. Make what cannot be pickled (locks, files) inside the function."
            ) from error


def _local_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """The loaded modules that a rank cannot import under their name."""
    names = {name for name in list(sys.modules) if _is_test_module(name)}
    while isinstance(function, functools.partial):
        function = function.func
    own = getattr(function, "__module__", None)
    if own in sys.modules and "." not in own and not _is_package_or_builtin(sys.modules[own]):
        names.add(own)  # a lone file: a script, or a test under an unusual name
    return [sys.modules[name] for name in sorted(names)]


def _is_test_module(name: str) -> bool:
    last = name.rpartition(".")[2]
    if not (last.startswith("test_") or last.endswith("_test") or last == "conftest"):
        return False
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and "site-packages" not in file


def _is_package_or_builtin(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if module.__name__ in sys.stdlib_module_names:
        return True
    return hasattr(module, "__path__") or file is None or "site-packages" in file


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
