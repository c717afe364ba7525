"""A config written in Python: a file that defines ``config``."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from paceline.config.keys import nearest
from paceline.config.modules import names_bound, statements_in
from paceline.config.schema import Config
from paceline.config.sources import Path
from paceline.config.validate import explain
from paceline.errors import ConfigError, PacelineError


def read(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """Run the file; returns its ``config`` (a dict or a ``Config``) and the line of each key.

    Lines are known for keys written in a literal ``config = {...}`` or ``config = dict(...)``.
    Modules beside the file can be imported from it, as from a script.
    """
    try:
        tree = ast.parse(text, filename=name)
    except (RecursionError, MemoryError):
        raise ConfigError(f"{name}: not valid Python: nested too deeply to read") from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{name}{line}: not valid Python: {reason}") from None
    # A training script given by mistake is not run to its end to find out.
    variables = _run(tree, name) if may_define_config(tree) else {}
    if "config" not in variables:
        bound = {found for part in statements_in(tree.body) for found in names_bound(part)}
        near = nearest("config", {*variables, *bound} - {"__name__", "__file__"}, 0.5)
        hint = f"; did you mean to call {near!r} so?" if near else ""
        script = f"a script that trains by itself runs with: paceline train --script {name}"
        raise ConfigError(
            f"{name}: defines no 'config' (a dict or a paceline Config){hint or f'; {script}'}"
        )
    config = variables["config"]
    if not isinstance(config, Mapping | Config):
        raise ConfigError(
            f"{name}: 'config' must be a dict or a paceline Config; got {type(config).__name__}"
        )
    return config, _lines(tree)


def may_define_config(tree: ast.Module) -> bool:
    """Whether running the file could give ``config`` a value, as far as reading it tells."""
    for statement in statements_in(tree.body):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            return True
        if "config" in names_bound(statement):
            return True
    return any(
        (isinstance(node, ast.Global) and "config" in node.names)
        or (isinstance(node, ast.Name) and node.id in ("globals", "vars", "exec"))
        or (isinstance(node, ast.NamedExpr | ast.Delete) and "config" in ast.unparse(node))
        for node in ast.walk(tree)
    )


def _run(tree: ast.Module, name: str) -> dict[str, Any]:
    variables: dict[str, Any] = {"__name__": "paceline_config", "__file__": name}
    folder = str(FilePath(name).resolve().parent)
    sys.path.insert(0, folder)
    try:
        exec(compile(tree, name, "exec"), variables)
    except ValidationError as error:
        raise ConfigError(
            [f"{name}:{_line_in(error, name)}: {text}" for _, text in explain(error)]
        ) from None
    except PacelineError as error:
        raise ConfigError(f"{name}:{_line_in(error, name)}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{name}:{_line_in(error, name)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return variables


def _line_in(error: BaseException, name: str) -> int:
    """The last line of the file itself that the error went through."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == name and frame.lineno
    ]
    return lines[-1] if lines else 1


def _lines(tree: ast.Module) -> dict[Path, int]:
    lines: dict[Path, int] = {}
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == "config" for target in targets):
            assert isinstance(statement, ast.Assign | ast.AnnAssign)
            lines = _lines_of(statement.value, ())
    return lines


def _lines_of(node: ast.expr | None, path: Path) -> dict[Path, int]:
    lines: dict[Path, int] = {}
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                lines[(*path, key.value)] = key.lineno
                lines |= _lines_of(value, (*path, key.value))
    elif isinstance(node, ast.Call):  # dict(steps=3), Config(train=Train(steps=3))
        for keyword in node.keywords:
            if keyword.arg is not None:
                lines[(*path, keyword.arg)] = keyword.lineno or node.lineno
                lines |= _lines_of(keyword.value, (*path, keyword.arg))
    return lines
