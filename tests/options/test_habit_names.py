"""Every name that people bring from other libraries has its exact answer, wherever it is typed.

The answers are in ``habit_answers.txt``. After a change of the table, look at what
``python tests/options/test_habit_names.py`` has changed in that file.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

import paceline
from paceline.cli.app import app
from paceline.config.keys import FIELDS, suggest, unknown_key
from paceline.errors import ConfigError, PacelineError
from paceline.launch.api import launch
from paceline.options.habits.names import HABITS, MEANINGS, SECTIONS

HERE = Path(__file__).parent
ANSWERS = HERE / "habit_answers.txt"
TAKEN = "(an argument of its own)"
COMMAND: Any = typer.main.get_command(app)
TRAIN: Any = COMMAND.commands["train"]


def trainer(**typed: Any) -> Any:
    return paceline.Trainer(nn.Linear(1, 1), optimizer=torch.optim.SGD, **typed)


def engine(**typed: Any) -> Any:
    return paceline.Engine(nn.Linear(1, 1), optimizer=torch.optim.SGD, **typed)


def fit(**typed: Any) -> Any:
    return trainer(global_batch=2).fit([1, 2], **typed)


def prepare(**typed: Any) -> Any:
    model = nn.Linear(1, 1)
    return paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), **typed)


def loader(**typed: Any) -> Any:
    return paceline.loader([1, 2], **typed)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Trainer": (trainer, paceline.Trainer),
    "fit": (fit, paceline.Trainer.fit),
    "Engine": (engine, paceline.Engine),
    "prepare": (prepare, paceline.prepare),
    "loader": (loader, paceline.loader),
}


def in_python(call: str, name: str) -> str:
    type_it, taker = CALLS[call]
    if name in inspect.signature(taker).parameters:
        return TAKEN
    with pytest.raises(PacelineError) as caught:
        type_it(**{name: 1})
    said = str(caught.value)
    assert said.startswith(f"{call} got an unknown argument {name}. ")
    return said.removeprefix(f"{call} got an unknown argument {name}. ")


def in_config(name: str) -> str:
    if (name,) in FIELDS:
        return TAKEN
    said = unknown_key((name,), (), suggest((), name))
    return re.sub(rf"^unknown key '{name}'[;.] ", "", said)


def on_command_line(name: str) -> str:
    option = f"--{name.replace('_', '-')}"
    try:
        TRAIN.make_context("train", ["c.yaml", option, "1"])
    except ConfigError as error:
        return re.sub(rf"^{option}(: | 1: )", "", str(error))
    return TAKEN


def answers(name: str) -> Iterator[str]:
    """The lines of a name: what fit, Engine, prepare and loader say only where it is different."""
    first = in_python("Trainer", name)
    yield f"  Trainer: {first}"
    for call in list(CALLS)[1:]:
        if (said := in_python(call, name)) != first:
            yield f"  {call}: {said}"
    if HABITS[name].in_config:
        yield f"  config: {in_config(name)}"
    yield f"  paceline train: {on_command_line(name)}"


def test_every_row_has_its_exact_answer_everywhere() -> None:
    """A block of the file: the names that have these answers, and the answers."""
    known: dict[str, list[str]] = {}
    for block in ANSWERS.read_text(encoding="utf-8").rstrip("\n").split("\n\n"):
        names, *said = block.splitlines()
        known |= dict.fromkeys(names.split(), said)
    assert set(known) == set(HABITS)
    for name in HABITS:
        assert list(answers(name)) == known[name], name


def names_in(example: str) -> Iterator[tuple[str, list[str]]]:
    """The calls of Paceline in an example, with the names of their arguments."""
    try:
        tree = ast.parse(example.replace("model, ..., ", "model, "))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), [word.arg for word in node.keywords if word.arg]


def test_every_example_names_what_there_is() -> None:
    """Calls and their arguments, config keys, options of the command."""
    checked = 0
    for meaning in MEANINGS.values():
        for example in (meaning.python, *meaning.at.values()):
            for call, words in names_in(example):
                if not call.startswith(("paceline.", "trainer.")) or "()" in call:
                    continue
                found: Any = paceline if call.startswith("paceline.") else paceline.Trainer
                for part in call.split(".")[1:]:
                    found = getattr(found, part)
                found = launch if found is paceline.launch else found  # a module that is called
                assert set(words) <= set(inspect.signature(found).parameters), example
                checked += 1
        free = ("optimizer.args.", "launch.env.")
        key = meaning.key
        assert key is None or key.startswith(free) or tuple(key.split(".")) in FIELDS, key
        options = {name for parameter in TRAIN.params for name in parameter.opts}
        assert {w for w in meaning.on_command_line.split() if w.startswith("--")} <= options
    assert checked > 60
    assert {habit.meant for habit in HABITS.values()} == set(MEANINGS)
    assert all((section,) in FIELDS for section in SECTIONS.values())


def test_the_arguments_of_other_libraries_are_all_answered() -> None:
    """``habit_sources.txt`` has the argument lists of their releases, one library in a block."""
    ours = {name for _, taker in CALLS.values() for name in inspect.signature(taker).parameters}
    text = (HERE / "habit_sources.txt").read_text(encoding="utf-8")
    for block in text.strip().split("\n\n"):
        title, *lines = block.splitlines()
        missing = set(" ".join(lines).split()) - set(HABITS) - ours
        assert not missing, f"{title}: {sorted(missing)}"


def test_the_page_is_that_of_the_table() -> None:
    made = runpy.run_path(str(HERE.parents[1] / "docs" / "generate_names.py"))["page"]()
    page = HERE.parents[1] / "docs" / "coming-from" / "names.md"
    assert page.read_text(encoding="utf-8") == made, "run: python docs/generate_names.py"


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        (
            "Trainer",
            "Learning_Rate",
            "The learning rate is the optimizer's: optimizer=torch.optim.",
        ),
        ("Trainer", "learning_rat", "Did you mean learning_rate? The learning rate is the "),
        ("Trainer", "globl_batch", "Did you mean global_batch?"),
        ("Engine", "globl_batch", "Did you mean loader(global_batch=…)?"),
        ("loader", "zzzz", "It takes accumulate, collate_fn, compare, drop_last, "),
    ],
)
def test_a_name_that_no_list_has_gets_the_closest_or_the_list(
    call: str, name: str, said: str
) -> None:
    assert in_python(call, name).startswith(said)


def write() -> None:
    same: dict[tuple[str, ...], list[str]] = {}
    for name in HABITS:
        same.setdefault(tuple(answers(name)), []).append(name)
    blocks = ("\n".join([" ".join(names), *said]) for said, names in same.items())
    ANSWERS.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
