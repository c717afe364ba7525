"""The code in README and docs: every block is run or checked, or says above it why it is not.

| language | what is done with it |
|---|---|
| ``python`` | run, the blocks of a page in order and with shared names; a ``text`` block that follows at once is what it must print |
| ``pycon`` | a doctest |
| ``yaml`` | loaded as a config, and passes every check |
| ``bash`` | every ``paceline`` command is parsed by the real command line; files and extras exist |
| ``console`` | run; the rest of the block is what it must print |
| ``toml``, ``json`` | parsed |
| ``text`` | output, a tree, a formula: nothing |

``<!-- not run: reason -->`` above a block leaves it out (``paceline`` commands in it are parsed all
the same). ``<!-- on 2 ranks -->`` runs it on two live ranks. In output ``…`` stands for anything.
A block with a title, such as ``python title="examples/a.py"``, is that file, which has tests of its
own.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import paceline
from docs_blocks import PAGES, ROOT, Block, blocks
from paceline.cli import main
from paceline.cli.app import app
from paceline.config import check, load
from paceline.testing import make_mlp, make_vectors
from paceline.testing.plugin import Ranks

LANGUAGES = {"python", "pycon", "yaml", "bash", "console", "toml", "json", "text"}
ALL = {page: blocks(page) for page in PAGES}
COMMANDS: Any = typer.main.get_command(app)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def with_blocks(*languages: str) -> list[Any]:
    """The pages that have blocks in one of ``languages`` which are to be run."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page, found in ALL.items()
        if any(block.language in languages and is_run(block) for block in found)
    ]


def is_run(block: Block) -> bool:
    return block.not_run is None and block.file is None


def to_run(page: Path, *languages: str) -> Iterator[Block]:
    return (block for block in ALL[page] if block.language in languages and is_run(block))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, in which the repository's examples and recipes are found."""
    for name in ("examples", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def given_names() -> dict[str, Any]:
    """What a page may use without making it: a small model and what belongs to it."""
    model, dataset = make_mlp(), make_vectors(64)
    loss = torch.nn.CrossEntropyLoss()
    return {
        "torch": torch,
        "paceline": paceline,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "loss": loss,
        "loss_fn": loss,
        "dataset": dataset,
        "train_dataset": dataset,
        "val_dataset": make_vectors(16),
        "dataloader": torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True),
        "batch": dataset[:8],
    }


class Names(dict[str, Any]):
    """The names of a page. Those it was given are made anew for each block, its own stay."""

    def __init__(self) -> None:
        super().__init__(__name__="guide")
        self._given: dict[str, Any] = {}

    def run(self, code: str, place: str) -> None:
        own = {name for name in self._given if self[name] is not self._given[name]}
        self._given = {name: value for name, value in given_names().items() if name not in own}
        self.update(self._given)
        exec(compile(code, place, "exec"), self)


def same_output(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what a page shows, where ``…`` stands for anything."""
    pattern = ".*".join(re.escape(part.strip("\n")) for part in shown.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), flags=re.DOTALL) is not None


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in ALL])
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    unknown = [
        f"{block.place}: {block.language or 'no language'}"
        for block in ALL[page]
        if block.language not in LANGUAGES
    ]
    assert unknown == []


def test_files_are_shown_as_they_are() -> None:
    shown = [block for found in ALL.values() for block in found if block.file is not None]
    assert len(shown) >= 14
    for block in shown:
        assert block.code == (ROOT / str(block.file)).read_text(encoding="utf-8"), block.place


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_runs(
    page: Path, folder: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    names = Names()
    for block in to_run(page, "python"):
        if block.ranks:
            ranks(run_on_a_rank, [block.code], block.place, world_size=block.ranks)
            continue
        names.run(block.code, block.place)
        printed = capsys.readouterr().out
        if block.output is not None:
            assert same_output(block.output, printed), f"{block.place} prints\n{printed}"
        for test in own_tests(block.code, names):
            (marker,) = test.pytestmark
            for size in marker.args:
                test(Ranks(ranks.pool, size), size)


def run_on_a_rank(codes: list[str], place: str) -> None:
    names = Names()
    for code in codes:
        names.run(code, place)


def own_tests(code: str, names: dict[str, Any]) -> Iterator[Any]:
    """The tests for several ranks that a block defines."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield names[node.name]


@pytest.mark.parametrize("page", with_blocks("pycon"))
def test_sessions_say_what_the_page_shows(page: Path, folder: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_configs_load_and_pass_every_check(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, block in enumerate(to_run(page, "yaml")):
        for name in re.findall(r"env:(\w+)", block.code):
            monkeypatch.setenv(name, "something of 16 bytes or more")
        for name in re.findall(r"file:~/([\w.-]+)", block.code):
            (folder / name).write_text("x" * 64)
            (folder / name).chmod(0o600)
        file = folder / f"example{number}.yaml"
        file.write_text(block.code)
        assert check(load(file), devices=0) == [], block.place


@pytest.mark.parametrize("page", with_blocks("console"))
def test_commands_print_what_the_page_shows(
    page: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for block in to_run(page, "console"):
        command, _, shown = block.code.partition("\n")
        monkeypatch.setattr(sys, "argv", shlex.split(command.removeprefix("$ ")))
        with pytest.raises(SystemExit):
            main()
        printed = "".join(capsys.readouterr())
        assert same_output(shown, printed), f"{block.place} prints\n{printed}"


@pytest.mark.parametrize("page", with_blocks("toml", "json"))
def test_other_files_can_be_read(page: Path) -> None:
    readers: dict[str, Callable[[str], Any]] = {"toml": tomllib.loads, "json": json.loads}
    for block in to_run(page, *readers):
        readers[block.language](block.code)


SHELL = [
    pytest.param(page, id=str(page.relative_to(ROOT)))
    for page, found in ALL.items()
    if any(block.language in ("bash", "console") for block in found)
]


@pytest.mark.parametrize("page", SHELL)
def test_shell_commands_are_sound(page: Path) -> None:
    wrong = []
    for block in ALL[page]:
        if block.language == "bash":
            lines = list(block.commands())
        elif block.language == "console":
            lines = [line[2:] for line in block.code.split("\n") if line.startswith("$ ")]
        else:
            continue
        wrong += [
            f"{block.place}: {' '.join(words)}: {problem}"
            for line in lines
            for words in simple_commands(line)
            if (problem := problem_with(words, block))
        ]
    assert wrong == []


def simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, as words: what stands between ``&&``, ``|`` and the like."""
    words = shlex.split(line, comments=True)
    command: list[str] = []
    for word in [*words, ";"]:
        if word in ("&&", "||", "|", ";", "&"):
            if command := list(without_redirection(command)):
                yield command
            command = []
        elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
            command.append(word)


def without_redirection(words: list[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if skip or re.fullmatch(r"\d?>>?", word):
            skip = not skip
        else:
            yield word


def problem_with(words: list[str], block: Block) -> str | None:
    """What is wrong with a command, or ``None``."""
    program, *arguments = words
    if program == "paceline":
        return problem_with_ours(arguments)
    if block.not_run:
        return None
    if program == "pip" and arguments[:1] == ["install"]:
        listed = re.findall(r"\[([^\]]+)\]", " ".join(arguments))
        extras = {name for names in listed for name in names.split(",")}
        missing = extras - set(PROJECT["optional-dependencies"])
        return f"no extra {missing}" if missing else None
    if program.startswith("python") and arguments[:1] != ["-m"]:
        # What a page of the gallery says is typed where its example was copied to.
        places = (ROOT, ROOT / "examples" / "gallery", ROOT / "examples/gallery/language_model")
        return None if any((p / arguments[0]).exists() for p in places) else "no such file"
    known = ("python3", "python", ".", "mkdocs", "exit")
    return (
        None if program in known else "not a command that is checked: say above why it is not run"
    )


def problem_with_ours(arguments: list[str]) -> str | None:
    command = COMMANDS
    while hasattr(command, "commands"):
        if hasattr(command, "default") and (arguments or [""])[0] not in command.commands:
            arguments = [command.default, *arguments]
        if not arguments or arguments[0] not in command.commands:
            return None if arguments[:1] in (["--help"], ["--version"]) else "no such command"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.make_context(command.name, list(arguments))
    except Exception as error:  # click's own, whose module depends on typer's version
        return None if "--help" in arguments else f"{type(error).__name__}: {error}"
    return None


def test_a_shown_output_may_leave_things_out() -> None:
    assert same_output("a …\nb\n", "a long line\nb\n")
    assert same_output("a\n…\nc", "a\nb\nb\nc\n")
    assert not same_output("a\nb", "a\nc")
