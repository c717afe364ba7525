"""Import paths: what stands behind ``package.module:Name``, known by reading or by importing it."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.keys import nearest
from paceline.config.modules import (
    Source,
    find_module,
    names_bound,
    read_source,
    statements_in,
)
from paceline.errors import ConfigError

_FARTHEST_REEXPORT = 8


@dataclass(frozen=True)
class Callee:
    """What a target is, as far as its source tells.

    ``kind`` is ``class``, ``function`` or ``unknown``. ``accepts`` are the keyword arguments it
    takes, in order, or ``None`` when it takes any or nobody knows; ``needs`` those without default.
    """

    kind: str = "unknown"
    accepts: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()


UNKNOWN = Callee()


def import_target(target: str, folders: Sequence[str] | None = None) -> Any:
    """Import what ``target`` names, looking in ``folders`` first (by default the current one).

    They go to the front of ``sys.path``, as with ``python -m``. Raises ``ConfigError`` when
    it is not there, or with the error of importing it behind it.
    """
    module_name, _, names = target.partition(":")
    if not names:
        raise ConfigError(f"{target!r} is not an import path like 'package.module:Name'")
    if folders is None:
        folders = [] if "" in sys.path or os.getcwd() in sys.path else [os.getcwd()]
    if sys.path[: len(folders)] != list(folders):
        sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import {target!r}: {error}") from error
    for name in names.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            near = nearest(name, [known for known in dir(value) if not known.startswith("_")])
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"cannot import {target!r}: there is no {name!r}{hint}") from None
    return value


def look_up(target: str, folders: Sequence[str] | None = None) -> Callee:
    """What ``target`` is, without importing it; ``ConfigError`` when it is not there.

    ``folders`` are looked in first, by default the current one.
    """
    module_name, _, names = target.partition(":")
    spec = find_module(module_name, folders)
    source = read_source(spec, folders) if spec is not None else None
    if source is None:
        return UNKNOWN
    first, *inner = names.split(".")
    found = _find(source, first)
    for name in inner:
        found = _member(found, name)
    if found is None:
        near = nearest(first, _public_names(source), cutoff=0.6) if not inner else None
        hint = f"; did you mean '{module_name}:{near}'?" if near else ""
        raise ConfigError(f"there is no {names!r} in module {module_name!r}{hint}")
    return _callee(found)


def argument_problems(
    callee: Callee, args: Mapping[str, Any], *, given: Collection[str] = (), all_needed: bool = True
) -> list[tuple[str, str]]:
    """Why ``callee`` cannot be called with ``args``: the argument and the text, one for each.

    ``given`` are arguments that the caller passes besides; with ``all_needed`` false, others may
    still be passed later.
    """
    problems = []
    for name in args:
        if callee.accepts is not None and name not in callee.accepts:
            near = nearest(name, callee.accepts)
            takes = ", ".join(known for known in callee.accepts if known not in given)
            hint = f"; did you mean {near!r}?" if near else f"; it takes {takes or 'none'}"
            problems.append((name, f"has no argument {name!r}{hint}"))
    missing = [name for name in callee.needs if name not in args and name not in given]
    if missing and all_needed:
        problems.append(("", f"needs the argument {', '.join(map(repr, missing))}"))
    return problems


@dataclass(frozen=True)
class _Found:
    """A statement that binds a name, in its module; ``statement`` is None when nobody can tell."""

    source: Source | None = None
    statement: ast.stmt | None = None


def _find(source: Source, name: str, depth: int = 0) -> _Found | None:
    """What binds ``name`` in a module, followed through imports; ``None`` when nothing does."""
    statements = [found for found in source.bindings.get(name, []) if not _is_overload(found)]
    if len(statements) > 1 or depth > _FARTHEST_REEXPORT:
        return _Found()  # which one holds is decided at run time
    if not statements:
        return _find_otherwise(source, name, depth)
    (statement,) = statements
    if isinstance(statement, ast.ImportFrom):
        original = next(
            alias.name for alias in statement.names if (alias.asname or alias.name) == name
        )
        # What another module's import brings may be made there at run time: not found is unknown.
        return _find_in(source, source.imported_from(statement), original, depth) or _Found()
    return _Found(source, statement)


def _find_otherwise(source: Source, name: str, depth: int) -> _Found | None:
    for star in source.stars:
        found = _find_in(source, source.imported_from(star), name, depth)
        if found is not None:
            return found
    maybe = source.open_ended or source.has_submodule(name) or source.declares_global(name)
    return _Found() if maybe else None


def _find_in(importing: Source, module_name: str, name: str, depth: int) -> _Found | None:
    try:
        spec = find_module(module_name, importing.folders)
        source = read_source(spec, importing.folders) if spec is not None else None
    except ConfigError:
        return _Found()
    return _find(source, name, depth + 1) if source is not None else _Found()


def _public_names(source: Source, depth: int = 0) -> set[str]:
    names = {name for name in source.bindings if not name.startswith("_")}
    for star in source.stars if depth < _FARTHEST_REEXPORT else []:
        try:
            spec = find_module(source.imported_from(star), source.folders)
            inner = read_source(spec, source.folders) if spec is not None else None
        except ConfigError:
            continue
        names |= _public_names(inner, depth + 1) if inner is not None else set()
    return names


def _member(found: _Found | None, name: str) -> _Found | None:
    if found is None or not isinstance(found.statement, ast.ClassDef):
        return found and _Found()
    inner = [part for part in found.statement.body if getattr(part, "name", None) == name]
    inherits = bool(found.statement.bases or found.statement.keywords)
    assigned = any(
        not hasattr(part, "name") and not isinstance(part, ast.Expr | ast.Pass)
        for part in found.statement.body
    )
    if not inner:
        return _Found() if inherits or assigned else None
    # A method needs its class or an instance first: only a nested class is callable as it stands.
    return _Found(found.source, inner[-1]) if isinstance(inner[-1], ast.ClassDef) else _Found()


def _callee(found: _Found) -> Callee:
    match found.statement:
        case ast.ClassDef():
            return _class(found.source, found.statement)
        case ast.FunctionDef() as function:
            if function.decorator_list:
                return Callee("function")
            return Callee("function", *_parameters(function))
    return UNKNOWN


def _class(source: Source | None, statement: ast.ClassDef, depth: int = 0) -> Callee:
    """A class and the arguments of its ``__init__``, its own or that of its only base."""
    if statement.decorator_list or statement.keywords:
        return Callee("class")  # a dataclass, or a class whose metaclass may do anything
    makers = [
        part
        for part in statements_in(statement.body)
        if {"__init__", "__new__"} & set(names_bound(part)) and not _is_overload(part)
    ]
    if makers:
        match makers:
            case [ast.FunctionDef(name="__init__", decorator_list=[]) as init]:
                return Callee("class", *_parameters(init, skip=1))
        return Callee("class")
    if not statement.bases:
        return Callee("class", ())
    base = statement.bases[0]
    if len(statement.bases) == 1 and isinstance(base, ast.Name) and source and depth < 8:
        found = _find(source, base.id)
        if found is not None and isinstance(found.statement, ast.ClassDef):
            return _class(found.source, found.statement, depth + 1)
    return Callee("class")


def _parameters(
    function: ast.FunctionDef, skip: int = 0
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The keyword arguments of a function (``None`` for any) and those it cannot do without."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = positional[skip : len(positional) - len(arguments.defaults)]
    needs = [argument.arg for argument in without_default]
    accepts = [argument.arg for argument in positional[skip:] if argument in arguments.args]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        accepts.append(argument.arg)
        if default is None:
            needs.append(argument.arg)
    return (None if arguments.kwarg else tuple(accepts)), tuple(needs)


def _is_overload(statement: ast.stmt) -> bool:
    decorators = getattr(statement, "decorator_list", [])
    return any(ast.unparse(decorator).endswith("overload") for decorator in decorators)
