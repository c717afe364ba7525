"""docs/guides/data.md says what happens, and the example runs."""

import doctest
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_guide() -> None:
    result = doctest.testfile(str(ROOT / "docs/guides/data.md"), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 10


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/data_resume.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith("all 20 samples, each once\n")
