"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

COMMANDS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "layers": ["lint-imports"],
}


@pytest.mark.timeout(900)  # the type checker starts without a cache on a new machine
@pytest.mark.parametrize("name", COMMANDS)
def test_clean(name: str) -> None:
    program, *arguments = COMMANDS[name]
    done = subprocess.run([BIN / program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imports_of(file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, also inside functions or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules.keys() or {node.module}
    return found & modules.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    source = ROOT / "src"
    modules = {
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file
        for file in source.rglob("*.py")
    }
    graph = {name: imports_of(file, modules) - {name} for name, file in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_docstrings_are_plain_text() -> None:
    """As ``help()`` and the site show them: without Sphinx roles."""
    role = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`")
    files = sorted((ROOT / "src").rglob("*.py"))
    assert [str(file) for file in files if role.search(file.read_text(encoding="utf-8"))] == []
