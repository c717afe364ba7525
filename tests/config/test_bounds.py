"""Whatever file is given as a config, it is read or refused in a moment, with the bound named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.config import check, load
from paceline.config.bounds import MOST_BYTES, MOST_LEVELS, MOST_VALUES
from paceline.errors import ConfigError


def refusal(source: Any = None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(source, overrides)
    assert len(str(refused.value)) < 3000
    return str(refused.value)


def bomb(levels: int, width: int = 9, leaf: str = "lol") -> str:
    """Lists of lists by alias: ``width ** levels`` values in a few hundred bytes."""
    lines = [f"a0: &a0 [{', '.join([leaf] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


MAPPINGS = "x0: &x0 {a: 1, b: 1}\n" + "".join(
    f"x{i}: &x{i} {{a: *x{i - 1}, b: *x{i - 1}, c: *x{i - 1}}}\n" for i in range(1, 20)
)
MERGES = "x0: &x0 {a: 1}\n" + "".join(
    f"x{i}: &x{i} {{<<: [{', '.join([f'*x{i - 1}'] * 9)}], k{i}: 1}}\n" for i in range(1, 12)
)
LONG_TEXT = f"a: &a {'x' * 100_000}\nmodel: {{args: {{y: [{', '.join(['*a'] * 1000)}]}}}}"


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        (bomb(9), f"more than {MOST_VALUES:,} values"),
        (MAPPINGS, f"more than {MOST_VALUES:,} values"),
        (MERGES, f"more than {MOST_VALUES:,} values"),
        (LONG_TEXT, "characters"),
        ("a: [" + "1," * 60_000 + "1]", f"more than {MOST_VALUES:,} values"),
        ("\n".join(f"k{i}: 1" for i in range(9_000)), f"more than {MOST_VALUES:,} values"),
        ("[" * 100_000, f"more than {MOST_LEVELS} levels"),
        ("{a: " * 20_000, f"more than {MOST_LEVELS} levels"),
        ("- " * 2_000 + "1", f"more than {MOST_LEVELS} levels"),
        ("# \n" * 50_000, f"{MOST_BYTES:,}"),
        ("seed: " + "9" * 100_000, "a number of 100000 digits"),
        ("seed: 0x" + "f" * 100_000, "a number of 100002 digits"),
        ("optimizer: {lr: 1e999}", "too large for a floating-point number"),
        ("optimizer: {lr: " + "9" * 5_000 + ".5}", "too large for a floating-point number"),
        ("a: &a [*a]", "an alias (*) stands inside what it names"),
        ("<<: &a {<<: *a}", "an alias (*) stands inside what it names"),
        ("seed: !!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.system"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_yaml_that_holds_too_much(text: str, bound: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert bound in refusal(file)


@pytest.mark.parametrize("content", [b"\x00", b"seed: 1\n\x00", "seed: 1\n".encode("utf-16")])
def test_bytes_that_are_no_text(content: bytes, tmp_path: Path) -> None:
    for name in ("c.yaml", "c.py", "c.json"):
        (tmp_path / name).write_bytes(content)
        assert str(tmp_path / name) in refusal(tmp_path / name)


def test_what_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with open(tmp_path / "sparse.yaml", "wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name, why in (
        ("fifo.yaml", "is a pipe, not a file"),
        ("zero.yaml", "is a device, not a file"),
        ("sparse.yaml", f"a file of this kind has at most {MOST_BYTES:,}"),
        ("loop.yaml", "no such file"),
        ("c\0.yaml", ""),
    ):
        assert why in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("override", "bound"),
    [
        ("seed=" + "9" * 10_000, "a number of 10000 digits"),
        ("model.args.x=" + "[" * 10_000, "levels"),
        ("model.args.x=[" + "1," * 10_000 + "1]", "values"),
        ("model.args" + ".x" * 10_000 + "=1", "levels"),
        (f"model.args={{{bomb(9).replace(chr(10), ', ')}}}", "values"),
    ],
    ids=["digits", "levels", "items", "dots", "aliases"],
)
def test_overrides_that_hold_too_much(override: str, bound: str) -> None:
    assert bound in refusal(None, override)


def test_python_data_that_holds_too_much(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["model"] = {"args": endless}
    assert f"more than {MOST_LEVELS} levels" in refusal(endless)
    deep: Any = 1
    for _ in range(10_000):
        deep = {"a": deep}
    assert f"more than {MOST_LEVELS} levels" in refusal({"model": {"args": deep}})
    assert "about 10,001 digits" in refusal({"seed": 10**10_000})
    many = {"model": {"args": {"x": list(range(MOST_VALUES + 1))}}}
    assert f"more than {MOST_VALUES:,} values" in refusal(many)
    file = tmp_path / "c.py"
    for text in (
        "config = " + "(" * 5_000,
        "config = " + "[" * 500,
        "config = {'seed': 10**10_000}",
        "config = {}\nconfig['model'] = config",
        "config = " + "-" * 20_000 + "1",
    ):
        file.write_text(text)
        assert refusal(file).startswith(str(file))


def test_what_people_write_passes(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    weights = "[" + ", ".join(["0.001"] * 1000) + "]"
    file.write_text(
        f"x: &c {{weight: {weights}}}\n".replace("x: ", "loss: {target: 'a:b', args: ") + "}\n"
    )
    assert len(load(file).loss.args["weight"]) == 1000  # type: ignore[union-attr]
    assert load(None, ["model.args.big=" + "9" * 60]).model.args["big"] == int("9" * 60)
    assert load(None, ["model.args.top=.inf"]).model.args["top"] == float("inf")


def test_a_file_of_something_else_is_answered_in_short(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("".join(f"learning{i}: 1\n" for i in range(1500)))
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert len(refused.value.problems) == 101
    assert refused.value.problems[-1] == "… and 1400 more problems"
    assert refused.value.problems[0].startswith(f"{file}:1: unknown key 'learning0'")
    file.write_text(f"layout: {'x' * 100_000}")
    assert "layout 'xxx" in refusal(file)
    assert "a name has at most 100" in refusal({"name": "x" * 200})
    places = ",".join(f"h{i}:1" for i in range(15_000))
    problems = check(load({"launch": {"nnodes": 2, "rdzv": places}}), devices=0)
    assert "names 15000 places; at most 64" in "".join(problems)
