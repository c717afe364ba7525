"""The example runs (docs/guides/data.md: tests/test_docs_code.py)."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/data_resume.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith("all 20 samples, each once\n")
