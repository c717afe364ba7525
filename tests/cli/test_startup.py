"""The command line starts without torch; timings are printed by benchmarks/startup.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paceline

pytestmark = pytest.mark.cold

HEAVY = {"torch", "pydantic", "yaml", "rich", "numpy", "mlflow", "tensorboard", "transformers"}

LOADED_AFTER = """
import atexit, json, sys
atexit.register(lambda: print("LOADED " + json.dumps(sorted(sys.modules)), file=sys.stderr))
sys.argv = ["paceline", *{arguments!r}]
from paceline.cli import main
main()
"""


def run(code: str) -> tuple[str, set[str]]:
    """Run ``code`` in a fresh Python; returns what it printed and the packages it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    loaded = json.loads(done.stderr.rpartition("LOADED ")[2])
    return done.stdout, {name.partition(".")[0] for name in loaded}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    printed, loaded = run(LOADED_AFTER.format(arguments=arguments))
    assert "paceline" in printed
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    "arguments",
    [["config", "--help"], ["config", "check", "--help"], ["config", "check"], ["config", "show"]],
)
def test_config_commands_load_no_torch(arguments: list[str]) -> None:
    _, loaded = run(LOADED_AFTER.format(arguments=arguments))
    assert loaded & {"torch", "numpy", "rich"} == set()


def test_listing_checkpoints_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    _, loaded = run(LOADED_AFTER.format(arguments=["checkpoint", "ls", str(tmp_path)]))
    assert loaded & {"torch", "numpy"} == set()


def test_telling_what_happened_in_a_run_loads_no_torch(tmp_path: Path) -> None:
    record = tmp_path / "events.jsonl"
    record.write_text('{"kind": "Note", "message": "hello"}\n')
    soon = time.time() + 600  # when a busy machine gets round to it, it is still but a moment old
    os.utime(record, (soon, soon))
    printed, loaded = run(LOADED_AFTER.format(arguments=["diagnose", str(tmp_path)]))
    assert "is running" in printed, "its record has no end, and is a moment old"
    assert loaded & {"torch", "numpy", "rich", "yaml"} == set()


def test_import_paceline_loads_nothing_but_python() -> None:
    code = (
        "import sys; before = set(sys.modules); import paceline; import json; "
        "print('LOADED ' + json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)"
    )
    _, loaded = run(code)
    assert loaded - sys.stdlib_module_names == {"paceline"}


def test_version_is_that_of_the_package() -> None:
    printed, _ = run(LOADED_AFTER.format(arguments=["--version"]))
    assert printed == f"paceline {paceline.__version__}\n"
