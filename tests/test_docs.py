"""The site builds without a warning, and the pages lead where they say."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from docs_blocks import PAGES, ROOT

import paceline


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    generated = re.compile(r"(\.\./|docs/)*reference/[\w-]+\.md")
    local = [link for link in links if "://" not in link and not generated.fullmatch(link)]
    assert [link for link in local if not (page.parent / link).exists()] == []
