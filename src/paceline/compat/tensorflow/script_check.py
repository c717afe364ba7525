"""What can be said of a Keras script before any rank is started."""

from __future__ import annotations

import ast
from pathlib import Path

from paceline.compat.tensorflow.library import KERAS_3_FAILS

_STRATEGY = "MultiWorkerMirroredStrategy"


def check_script(script: Path) -> str | None:
    """Why ``script`` cannot train on several workers; ``None`` where nothing speaks against it.

    It is read, not run: what it imports through other files is not seen.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # others report that
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {alias.name for alias in _imported(tree)}
    if _STRATEGY not in names or "fit" not in names:
        return None
    line = _line_of_keras_3(tree)
    if line is None:
        return None
    return (
        f"line {line} imports Keras 3: {KERAS_3_FAILS}. Take Keras from TensorFlow (from "
        "tensorflow import keras), or import tf_keras as keras"
    )


def _imported(tree: ast.Module) -> list[ast.alias]:
    kinds = (ast.Import, ast.ImportFrom)
    return [alias for node in ast.walk(tree) if isinstance(node, kinds) for alias in node.names]


def _line_of_keras_3(tree: ast.Module) -> int | None:
    """Where ``import keras`` or ``from keras import …`` stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            continue
        if any(module.partition(".")[0] == "keras" for module in modules):
            return node.lineno
    return None
