"""The site builds without a warning, and the pages lead where they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from docs_blocks import PAGES, ROOT
from paceline.config.keys import FIELDS, section_of
from paceline.events import Event
from paceline.layout.rules import RULES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    generated = re.compile(r"(\.\./|docs/)*reference/[\w-]+\.md")
    local = [link for link in links if "://" not in link and not generated.fullmatch(link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``mkdocs build --strict`` does: a warning is an error."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_the_reference_has_every_public_name(site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in site.glob("reference/*/index.html")]
    anchors = {anchor for page in pages for anchor in re.findall(r'id="paceline\.(\w+)"', page)}
    modules = {"__version__", "errors", "events"}
    assert set(paceline.__all__) - modules <= anchors


def test_the_reference_has_every_command_key_rule_and_event(site: Path) -> None:
    shown = {
        name: (site / "reference" / name / "index.html").read_text(encoding="utf-8")
        for name in ("cli", "config", "rules", "events")
    }
    assert 'id="paceline-checkpoint-verify"' in shown["cli"]
    sections = (".".join(path) for path, field in FIELDS.items() if section_of(field) is None)
    assert {key for key in sections if f"<code>{key}</code>" not in shown["config"]} == set()
    assert {rule.name for rule in RULES if f'id="{rule.name}"' not in shown["rules"]} == set()
    kinds = {kind for kind in Event.kinds if kind.startswith(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))}
    assert {kind for kind in kinds if f'id="{kind.lower()}"' not in shown["events"]} == set()


def test_the_site_asks_nothing_of_the_network(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"')
    assert {
        url for page in site.glob("**/*.html") for url in loaded.findall(page.read_text())
    } == set()
