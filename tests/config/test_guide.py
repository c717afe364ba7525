"""docs/guides/config.md: every example in it loads, and every command says what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import Config, check, load

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guides" / "config.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_example_loads_and_passes_every_check(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r"env:(\w+)", text):
        monkeypatch.setenv(name, "something")
    file = tmp_path / "example.yaml"
    file.write_text(text)
    config = load(file)
    assert check(config, devices=0) == []


@pytest.mark.parametrize("text", blocks("console"))
def test_command_prints_what_the_page_shows(text: str) -> None:
    command, _, shown = text.partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "paceline"
    done = subprocess.run(
        [sys.executable, "-c", "from paceline.cli import main; main()", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.stdout == shown


def test_python_config_loads(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(blocks("python")[0])
    config = load(file)
    assert check(config, devices=0) == []
    assert config.model.args["heads"] == 4


def test_python_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(blocks("python")[1], {})


def test_every_section_has_its_example() -> None:
    shown = {line.partition(":")[0] for text in blocks("yaml") for line in text.split("\n")}
    assert set(Config.model_fields) <= shown
