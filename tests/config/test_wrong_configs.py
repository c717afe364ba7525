"""Every wrong config of wrong_configs.txt is answered with exactly its messages.

In that table a case is a line ``# name``, then the lines of a config file after ``|`` (none: the
demo), overrides, and everything that is said about them after ``>``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.config import load_checked
from paceline.errors import ConfigError


@dataclass
class Case:
    name: str
    lines: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def read_table() -> list[Case]:
    cases: list[Case] = []
    table = Path(__file__).with_name("wrong_configs.txt").read_text(encoding="utf-8")
    for line in table.split("\n"):
        if line.startswith("# "):
            cases.append(Case(line[2:]))
        elif line.startswith("|"):
            cases[-1].lines.append(line[2:])
        elif line.startswith("--set "):
            cases[-1].overrides.append(line.removeprefix("--set "))
        elif line.startswith("> "):
            cases[-1].messages.append(line[2:])
        else:
            assert not line or line.startswith("="), line
    return cases


CASES = read_table()


def problems(source: object, overrides: list[str]) -> list[str]:
    try:
        load_checked(source, overrides, devices=0)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error).split("\n")
    return []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_config_is_answered_with_exactly_its_messages(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if case.lines:
        Path("c.yaml").write_text("\n".join(case.lines) + "\n", encoding="utf-8")
    assert problems("c.yaml" if case.lines else None, case.overrides) == case.messages


def test_the_table_is_not_empty_and_names_each_case_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40
    assert all(case.messages for case in CASES)
