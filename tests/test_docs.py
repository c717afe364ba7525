"""The site builds without a warning, and the pages lead where they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from docs_blocks import PAGES, ROOT
from paceline.cli.app import app
from paceline.config.keys import FIELDS, section_of
from paceline.events import Event
from paceline.options.rules import RULES

MODULES = ("__version__", "errors", "events", "launch")
EVENTS = Event.__module__
COMMANDS: Any = typer.main.get_command(app)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    generated = re.compile(r"(\.\./|docs/)*reference/[\w-]+\.md")
    local = [link for link in links if "://" not in link and not generated.fullmatch(link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


# One test, so that workers that run side by side do not build the site several times.
def test_the_site_builds_and_its_reference_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    pages = {
        str(page.relative_to(tmp_path).parent): page.read_text(encoding="utf-8")
        for page in tmp_path.glob("**/index.html")
    }
    everything_public_is_there(pages)
    nothing_is_loaded_from_elsewhere(pages)


def everything_public_is_there(pages: dict[str, str]) -> None:
    """Every public name, command, config key, rule and event has its place in the reference."""
    anchors = {
        name: set(re.findall(r' id="([^"]+)"', text))
        for name, text in pages.items()
        if name.startswith("reference/")
    }
    names = {f"paceline.{name}" for name in paceline.__all__ if name not in MODULES}
    assert names - set().union(*anchors.values()) == set()
    commands = {f"paceline-{name}" for name in COMMANDS.commands}
    assert commands - anchors["reference/cli"] == set()
    assert {rule.name for rule in RULES} - anchors["reference/rules"] == set()
    kinds = {name.lower() for name, kind in Event.kinds.items() if kind.__module__ == EVENTS}
    assert kinds - anchors["reference/events"] == set()
    keys = {".".join(path) for path, field in FIELDS.items() if section_of(field) is None}
    assert {key for key in keys if f"<code>{key}</code>" not in pages["reference/config"]} == set()


def nothing_is_loaded_from_elsewhere(pages: dict[str, str]) -> None:
    """The site works without the network."""
    loaded = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"')
    assert {url for text in pages.values() for url in loaded.findall(text)} == set()
