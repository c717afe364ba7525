"""Which parts of a model are gathered, computed and freed together: the units of sharding."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from paceline.errors import TrainingError
from paceline.parallel.blocks import find_blocks

UnitRule = str | Sequence[str] | int | Callable[[str, nn.Module], bool]
"""One pattern, several, a number of parameters, or a function ``(name, module) -> bool``."""

_SHARE_WITHOUT_BLOCKS = 1 / 16
"""In a model without repeated blocks, a module with this share of all parameters is a unit."""

_SHARE_OF_A_TIED_BLOCK = 1 / 8
"""A block that cannot be a unit gives way to those of its children with this share of it."""


def find_units(model: nn.Module, units: UnitRule | None = None) -> list[str]:
    """Names of the modules of ``model`` to shard one by one, inner ones before outer ones.

    Without ``units``: the repeated blocks, and every other module whose own parameters are as many
    as a block's; in a model without blocks, every module that owns a sixteenth of all parameters.
    What is left, and whatever shares a parameter with another part, is sharded with the root.

    ``units`` overrides that: patterns on the dotted names (``"layers.*"``; ``*`` stands for one
    part of a name, ``**`` for any number of parts), a number of parameters, or a function
    ``(name, module) -> bool``. With a number, a module is a unit if it has so many that no unit
    inside of it has. An empty list makes the whole model one unit.
    """
    tied = _Ties(model)
    if units is None:
        found = _found_by_structure(model, tied)
    elif isinstance(units, int):
        found = _by_size(model, units, tied)
    else:
        found = _by_function(model, units) if callable(units) else _by_pattern(model, units)
        for name in found:
            _check_asked_for(name, model, tied)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=lambda name: (-name.count("."), order[name]))


def _found_by_structure(model: nn.Module, tied: _Ties) -> list[str]:
    found: list[str] = []
    sizes: list[int] = []
    for block in find_blocks(model):
        module = model.get_submodule(block)
        sizes.append(_size(module))
        found += _untied_parts(block, module, tied, sizes[-1] * _SHARE_OF_A_TIED_BLOCK)
    enough = sum(sizes) / len(sizes) if sizes else _size(model) * _SHARE_WITHOUT_BLOCKS
    for name, module in _outside(model, set(found)):
        if name and _own_size(module) >= enough and not tied.outside_of(module):
            found.append(name)
    return found


def _untied_parts(name: str, module: nn.Module, tied: _Ties, enough: float) -> list[str]:
    """``name`` alone, or, where it shares parameters with other parts, its larger children."""
    if _has_forward(module) and not tied.outside_of(module):
        return [name]
    return [
        part
        for key, child in module.named_children()
        if _size(child) >= enough
        for part in _untied_parts(f"{name}.{key}", child, tied, enough)
    ]


def _outside(model: nn.Module, units: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Every module outside the units whose own forward is sure to use its parameters.

    Inside a module that owns parameters itself nobody knows: ``nn.MultiheadAttention`` never calls
    the projection it holds, but reads its weight.
    """

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if name in units:
            return
        yield name, module
        if name and _own_size(module):
            return
        for key, child in module.named_children():
            yield from walk(f"{name}.{key}" if name else key, child)

    yield from walk("", model)


def _by_size(model: nn.Module, least: int, tied: _Ties) -> list[str]:
    """The innermost modules of at least so many parameters, and then those around them."""
    found: list[str] = []

    def left_in(name: str, module: nn.Module) -> int:
        """How many parameters of ``module`` are in no unit."""
        # See _outside: what is held by a module with parameters of its own may not be called.
        apart = _own_size(module) == 0 or not name
        left = _size(module)
        if apart:
            children = module.named_children()
            inside = [left_in(f"{name}.{key}" if name else key, child) for key, child in children]
            left = _own_size(module) + sum(inside)
        if name and left >= least and _has_forward(module) and not tied.outside_of(module):
            found.append(name)
            return 0
        return left

    left_in("", model)
    return found


def _by_function(model: nn.Module, rule: Callable[[str, nn.Module], bool]) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if name and _size(module) and rule(name, module)
    ]


def _by_pattern(model: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    named = {name: module for name, module in model.named_modules() if name and _size(module)}
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = [name for name in named if matches(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
            raise TrainingError(
                f"sharding: units={pattern!r} matches no module with parameters. Near names: "
                f"{', '.join(near)}. '*' stands for one part of a name, '**' for any number."
            )
        found.update(dict.fromkeys(matched))
    return list(found)


def matches(name: str, pattern: str) -> bool:
    """Whether the dotted ``name`` fits ``pattern`` part by part; ``**`` fits any number."""
    return _parts_match(name.split("."), pattern.split("."))


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return (
        bool(name)
        and fnmatch.fnmatchcase(name[0], pattern[0])
        and _parts_match(name[1:], pattern[1:])
    )


def _check_asked_for(name: str, model: nn.Module, tied: _Ties) -> None:
    module = model.get_submodule(name)
    if not _has_forward(module):
        raise TrainingError(
            f"sharding: the unit {name!r} is a {type(module).__name__}, which has no forward of "
            f"its own. Name its children, as in '{name}.*'."
        )
    shared = tied.outside_of(module)
    if shared:
        raise TrainingError(
            f"sharding: the unit {name!r} shares the parameter {shared!r} with another part of the "
            "model; both must be gathered together. Leave it out, so that it stays with the root."
        )


class _Ties:
    """Which modules share parameters with modules elsewhere, or are themselves held twice."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._several = {key: held[0] for key, held in names.items() if len(held) > 1}

    def outside_of(self, unit: nn.Module) -> str | None:
        """The name of a parameter of ``unit`` that can also be reached without it, if any."""
        held = {id(p) for p in unit.parameters()} & self._several.keys()
        if not held:
            return None
        seen: set[int] = {id(unit)}
        waiting = [self.model]
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for parameter in module.parameters(recurse=False):
                if id(parameter) in held:
                    return self._several[id(parameter)]
            waiting += module.children()
        return None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _own_size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters(recurse=False))
