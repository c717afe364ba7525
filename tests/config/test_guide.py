"""docs/guides/config.md: its config in Python loads (the rest of the page: tests/test_docs_code.py)."""

from __future__ import annotations

from pathlib import Path

from docs_blocks import ROOT, blocks
from paceline.config import check, load


def test_python_config_loads(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "guides" / "config.md")
    file = tmp_path / "example.py"
    file.write_text(next(block.code for block in page if block.language == "python"))
    config = load(file)
    assert check(config, devices=0) == []
    assert config.model.args["heads"] == 4
