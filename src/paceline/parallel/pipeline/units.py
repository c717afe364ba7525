"""The modules between which a model can be cut, and how calls to them are caught.

A unit runs whole on one stage: a repeated block, or outside blocks a module without children that
holds parameters or saved buffers. All other code of the model is glue, which every stage runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from paceline.parallel.blocks import find_blocks

Slot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


class Catcher(Protocol):
    """Is called instead of a unit."""

    def call_unit(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``call(*args, **kwargs)`` would run the unit."""


def find_units(model: nn.Module, extra: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The units of ``model`` by name; modules named in ``extra`` are units too."""
    blocks = set(find_blocks(model)) | set(extra)
    units: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def look(module: nn.Module, name: str) -> None:
        if module in seen:
            return
        seen.add(module)
        is_leaf = next(module.children(), None) is None
        if name in blocks or (is_leaf and _has_state(module)):
            units[name] = module
            seen.update(module.modules())
            return
        for key, child in module.named_children():
            look(child, f"{name}.{key}" if name else key)

    look(model, "")
    return units


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or bool(module.state_dict())


def slots_of(model: nn.Module) -> dict[str, list[Slot]]:
    """Where each parameter is held, by its name in ``model.named_parameters()``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots: dict[str, list[Slot]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                slots[names[id(parameter)]].append((module, key))
    return slots


class Catching:
    """Catches calls to units while a catcher is at work.

    Their classes get a subclass with another ``__call__``: it comes before every hook, also those
    that FSDP and tensor parallelism add later, and leaves modules and their names alone.
    """

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self._names = {id(module): name for name, module in units.items()}
        self._units = units
        self._catcher: Catcher | None = None
        self._classes: dict[type, type] = {}
        for module in units.values():
            module.__class__ = self._catching(type(module))

    def restore(self) -> None:
        """Give the units their own classes back."""
        own = {caught: original for original, caught in self._classes.items()}
        for module in self._units.values():
            module.__class__ = own[type(module)]

    @contextmanager
    def by(self, catcher: Catcher) -> Iterator[None]:
        """Let ``catcher`` have the calls."""
        before, self._catcher = self._catcher, catcher
        try:
            yield
        finally:
            self._catcher = before

    def _catching(self, kind: type) -> type:
        if kind not in self._classes:
            catching = self

            def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
                catcher, name = catching._catcher, catching._names.get(id(module))

                def call(*args: Any, **kwargs: Any) -> Any:
                    return kind.__call__(module, *args, **kwargs)

                if catcher is None or name is None:
                    return call(*args, **kwargs)
                return catcher.call_unit(name, call, args, kwargs)

            self._classes[kind] = type(
                kind.__name__,
                (kind,),
                {
                    "__call__": __call__,
                    "__module__": kind.__module__,
                    "__qualname__": kind.__qualname__,
                    "__doc__": kind.__doc__,
                },
            )
        return self._classes[kind]
