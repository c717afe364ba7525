"""What the pages name exists: rules, commands and their flags, config keys, names of the package."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from docs_blocks import PAGES, ROOT, blocks
from paceline.checkpoint.folder import Folder
from paceline.cli.app import app
from paceline.config import Config
from paceline.config.deepspeed.table import KEYS as DEEPSPEED_KEYS
from paceline.config.keys import FIELDS, is_free
from paceline.options.rules import RULES
from paceline.trainer.history import History

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FREE = {("checkpoint", "storage"), ("tensor", "plan"), ("compress", "rules"), ("device_map",)}
"""Mappings whose keys are the user's own."""
LINKS = ("reduction", "links")
NO_KEYS = {"train.npy", "a.b", "key", "train.stpes", "data.share", "metrics.csv"}
"""Placeholders, a mistake shown as one, an attribute of something called data, and a file."""
LATER = {"plan", "tune", "watch"}
"""Commands that the design announces."""

COMMANDS: Any = typer.main.get_command(app)
HELD: dict[str, type] = {
    "engine": paceline.Engine,
    "trainer": paceline.Trainer,
    "world": paceline.World,
    "history": History,
    "folder": Folder,
}
"""What the pages call objects that users hold."""
SUFFIXES = {"py", "md", "yaml"}


def pieces(text: str) -> Iterator[str]:
    """What a page sets in code: blocks, line by line with continued lines joined, and words."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").split("\n")
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", without_blocks)


def commands(text: str) -> Iterator[list[str]]:
    """The ``paceline …`` command lines of a page, as words."""
    for piece in pieces(text):
        found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*paceline ([a-z].*)", piece.strip())
        if found and not found[1].startswith("train |"):
            line = re.split(r"\s#\s|\s{2,}|[|;>]|&&", found[1].replace("[", " ").replace("]", " "))[
                0
            ]
            try:
                yield shlex.split(line)
            except ValueError:
                yield line.split()


def unknown_flags(words: list[str]) -> list[str]:
    command = COMMANDS
    for word in words:
        if not hasattr(command, "commands"):
            break
        if word not in command.commands and hasattr(command, "default"):
            command = command.commands[command.default]
            break
        if word.startswith("-"):
            break
        if word not in command.commands:
            return [word] if re.fullmatch(r"[a-z]+", word) and word not in LATER else []
        command = command.commands[word]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    ours = words[: words.index("--")] if "--" in words else words
    flags = [word.partition("=")[0] for word in ours if re.match(r"--[a-z]", word)]
    return [flag for flag in flags if flag not in known]


def is_key(path: tuple[str, ...]) -> bool:
    if path in FIELDS:
        return True
    around = [path[:length] for length in range(1, len(path))]
    return any(p in FREE or p == LINKS or (p in FIELDS and is_free(p)) for p in around)


def keys_named(text: str) -> Iterator[str]:
    """Dotted keys of a config: in ``--set``, and in words that begin with a section's name."""
    sections = {path[0] for path in FIELDS if len(path) > 1}
    for piece in pieces(text):
        yield from re.findall(r"--set ['\"]?([a-z_]+(?:\.[A-Za-z_0-9*]+)*)=", piece)
        alone = re.fullmatch(r"([a-z_]+)((?:\.[a-z_]+)+)(?:[:=].*)?", piece)
        if alone and alone[1] in sections and not alone[2].endswith((".py", ".md", ".yaml", ".pt")):
            yield alone[1] + alone[2]


@functools.cache
def attributes(kind: type) -> set[str]:
    """What an object of ``kind`` has, as far as its class and its source tell."""
    own = {name for part in kind.__mro__ for name in getattr(part, "__annotations__", {})}
    sources = [inspect.getsource(part) for part in kind.__mro__ if part is not object]
    assigned = {
        name for text in sources for name in re.findall(r"self\.(\w+)(?:, self|\b.*=)", text)
    }
    return {*dir(kind), *own, *assigned}


@functools.cache
def exists(dotted: str) -> bool:
    """Whether a dotted name of the package can be had, by importing as much of it as is a module."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_and_flag_exists(page: Path) -> None:
    unknown = {
        f"paceline {' '.join(words)}: {flag}"
        for words in commands(page.read_text(encoding="utf-8"))
        for flag in unknown_flags(words)
    }
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_key_of_a_config_exists(page: Path) -> None:
    named = set(keys_named(page.read_text(encoding="utf-8")))
    if page.name == "deepspeed.md":  # some of DeepSpeed's keys begin like our own
        named -= set(DEEPSPEED_KEYS)
    assert {key for key in named - NO_KEYS if not is_key(tuple(key.split(".")))} == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_name_of_the_package_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set()
    for piece in pieces(text):
        named |= set(re.findall(r"(?<![\w./-])paceline(?:\.[A-Za-z_]\w*)+", piece))
        imported = re.match(r"\s*from (paceline[\w.]*) import ([\w, ]+)", piece)
        if imported:
            named |= {
                f"{imported[1]}.{name.strip().split(' ')[0]}" for name in imported[2].split(",")
            }
    files = (".yaml", ".schema.json", ".json", ".py")
    assert {name for name in named if not name.endswith(files) and not exists(name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_attribute_of_what_users_hold_exists(page: Path) -> None:
    text = "\n".join(pieces(page.read_text(encoding="utf-8")))
    wrong = {
        f"{name}.{attribute}"
        for name, attribute in re.findall(r"(?<![\w.])([a-z]+)\.([a-z]\w*)", text)
        if name in HELD and attribute not in attributes(HELD[name]) and attribute not in SUFFIXES
    }
    assert wrong == set()


def test_the_page_of_layouts_has_every_rule() -> None:
    text = (ROOT / "docs" / "guides" / "layouts.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    told = {
        name for row in rows for name in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", row.split("|")[1])
    }
    assert told == {rule.name for rule in RULES}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "design.md"], ids=str)
def test_every_file_of_ours_exists(page: Path) -> None:
    # The design is left out: it names files of other projects, too.
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`(?:python )?((?:tests|benchmarks|examples|recipes)/[\w/.]+)", text)
    assert [name for name in named if not (ROOT / name.rstrip(".")).exists()] == []


def test_the_page_of_configs_has_an_example_of_every_section() -> None:
    examples = [
        block.code for block in blocks(ROOT / "docs/guides/config.md") if block.language == "yaml"
    ]
    shown = {line.partition(":")[0] for text in examples for line in text.split("\n")}
    assert set(Config.model_fields) <= shown


def test_the_page_of_checkpoints_has_every_command_and_only_real_options() -> None:
    text = (ROOT / "docs" / "guides" / "checkpoints.md").read_text(encoding="utf-8")
    known = {
        name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in COMMANDS.commands["checkpoint"].commands.items()
    }
    assert set(re.findall(r"^\| `(\w+) [A-Z]", text, flags=re.MULTILINE)) == set(known)
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= set().union(*known.values())
