"""Finding modules and the names in them by reading source files, without importing anything.

Importing a model's module would load torch and run the user's code in the launcher. Reading it
tells enough to refuse a misspelled name or argument before any process starts. Where reading
cannot tell (compiled modules, names made at run time), the answer is "unknown", never "missing".
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder

from paceline.config.keys import nearest
from paceline.errors import ConfigError

_MADE_AT_RUN_TIME = ("globals()", "sys.modules[__name__]", "exec(", "vars()", "setattr(sys.modules")


def find_module(name: str, folders: Sequence[str] | None = None) -> ModuleSpec | None:
    """Where module ``name`` is; ``None`` when only importing it could tell.

    Looks in ``folders`` first (by default the current one), then where Python looks. Raises
    ``ConfigError`` when the module is nowhere.
    """
    top, *rest = name.split(".")
    folders = [os.getcwd()] if folders is None else folders
    here = [found for folder in folders if (found := PathFinder.find_spec(top, [folder]))]
    # A mere folder of that name counts only when there is no real module, as in Python itself.
    real = next((found for found in here if found.origin), None)
    spec = real or _installed(top) or next(iter(here), None)
    if spec is None:
        if name in sys.modules:
            return None
        near = nearest(top, _module_names(list(folders)), 0.6)
        near = near or nearest(top, _module_names(sys.path), 0.8)
        only_here = list(folders) == [os.getcwd()]
        where = "in this folder" if only_here else f"in {' or '.join(folders)}"
        hint = f"did you mean {near!r}?" if near else f"not {where}, nor installed"
        raise ConfigError(f"there is no module {top!r}; {hint}")
    full = top
    for part in rest:
        folders = list(spec.submodule_search_locations or [])
        inner = PathFinder.find_spec(f"{full}.{part}", folders) if folders else None
        if inner is None:
            if f"{full}.{part}" in sys.modules:
                return None
            near = nearest(part, _module_names(folders))
            hint = f"; did you mean '{full}.{near}'?" if near else ""
            raise ConfigError(f"there is no module {part!r} in {full!r}{hint}")
        spec, full = inner, f"{full}.{part}"
    return spec


def module_file(top: str, folder: str) -> str | None:
    """The file of the top-level module ``top`` in ``folder``, or of the package; else ``None``.

    A mere folder of that name is a package only where no module of that name is installed.
    """
    spec = PathFinder.find_spec(top, [folder])
    if spec is None:
        return None
    if spec.origin is None:
        return None if _installed(top) else os.path.join(folder, top)
    return spec.origin


def _module_names(folders: list[str]) -> set[str]:
    return {found.name for found in pkgutil.iter_modules(folders)}


def _installed(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module that is loaded but says nothing of where it came from
        return None


class Source:
    """The names that a module's source file binds at its top level."""

    def __init__(
        self, spec: ModuleSpec, tree: ast.Module, text: str, folders: Sequence[str] | None = None
    ) -> None:
        self.spec = spec
        self.folders = folders
        self.name = spec.name
        self.tree = tree
        self.bindings: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        for statement in statements_in(tree.body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            for name in names_bound(statement):
                self.bindings.setdefault(name, []).append(statement)
        self.open_ended = "__getattr__" in self.bindings or any(
            sign in text for sign in _MADE_AT_RUN_TIME
        )

    def imported_from(self, statement: ast.ImportFrom) -> str:
        """The full name of the module that ``from … import`` reads."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        if not self.spec.submodule_search_locations:
            parts.pop()
        parts = parts[: len(parts) - (statement.level - 1)]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def declares_global(self, name: str) -> bool:
        """Whether some function sets ``name`` for the whole module when it runs."""
        return any(
            isinstance(node, ast.Global) and name in node.names for node in ast.walk(self.tree)
        )

    def has_submodule(self, name: str) -> bool:
        """Whether the module is a package with a module ``name`` in it."""
        folders = list(self.spec.submodule_search_locations or [])
        return bool(folders) and PathFinder.find_spec(f"{self.name}.{name}", folders) is not None


def read_source(spec: ModuleSpec, folders: Sequence[str] | None = None) -> Source | None:
    """The source of a module, or ``None`` when it has none; a syntax error is a ConfigError.

    ``folders`` are those in which the modules that it imports are looked for.
    """
    if not spec.has_location or not spec.origin or not spec.origin.endswith(".py"):
        return None
    with open(spec.origin, "rb") as file:
        content = file.read()
    try:
        tree = ast.parse(content, filename=spec.origin)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(
            f"module {spec.name!r} is not valid Python: {spec.origin}{line}: {reason}"
        ) from None
    return Source(spec, tree, content.decode("utf-8", "replace"), folders)


def statements_in(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those in ``if``, ``try``, ``with`` and loops."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.For | ast.While):
            yield from statements_in([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.With):
            yield from statements_in(statement.body)
        elif isinstance(statement, ast.Try | ast.TryStar):
            inner = [part for handler in statement.handlers for part in handler.body]
            yield from statements_in(
                [*statement.body, *inner, *statement.orelse, *statement.finalbody]
            )


def names_bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement by itself gives a value."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            if alias.name != "*":
                yield alias.asname or alias.name
    else:
        for target in _targets(statement):
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


def _targets(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Assign():
            return statement.targets
        case ast.AnnAssign() | ast.For():
            return [statement.target]
        case ast.With():
            return [item.optional_vars for item in statement.items if item.optional_vars]
    return []
