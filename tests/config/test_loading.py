"""Where a config may come from, and what is said when it cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import Config, check, load
from paceline.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_nothing_is_the_demo() -> None:
    assert load() == load(None) == Config()
    assert check(load(), devices=0) == []


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "0.0003", "3.0e-4", ".0003", "3e-04"])
def test_a_small_number_may_be_written_any_way(text: str) -> None:
    Path("c.yaml").write_text(f"optimizer: {{lr: {text}}}\n")
    assert load("c.yaml").optimizer.lr == 3e-4


def test_scalars_are_those_of_yaml_1_2() -> None:
    Path("c.yaml").write_text(
        "model:\n  target: a:b\n  args: {a: on, b: yes, c: 1_000, d: 010, e: 2024-01-01, f: 1:30, "
        "g: 0x1F, h: 0o17, i: ~, j: True, k: -1.5e+3, l: !!str 3, m: 5., n: -.inf}\n"
    )
    assert load("c.yaml").model.args == {
        "a": "on",
        "b": "yes",
        "c": 1000,
        "d": 10,
        "e": "2024-01-01",
        "f": "1:30",
        "g": 31,
        "h": 15,
        "i": None,
        "j": True,
        "k": -1500.0,
        "l": "3",
        "m": 5.0,
        "n": float("-inf"),
    }


def test_a_key_called_on_is_not_true() -> None:
    Path("c.yaml").write_text("launch:\n  on: local\n  nproc: 3\n")
    assert load("c.yaml").launch.nproc == 3


def test_json_is_read_too() -> None:
    Path("c.json").write_text(json.dumps({"train": {"steps": 7}, "optimizer": {"lr": 1e-05}}))
    assert load("c.json").train.steps == 7
    assert load("c.json").optimizer.lr == 1e-05


def test_anchors_and_merges() -> None:
    Path("c.yaml").write_text(
        "data:\n  target: a:b\n  args: &common {x: 1, y: 2}\n"
        "  val: {target: a:c, args: {<<: *common, y: 3}}\n"
    )
    config = load("c.yaml")
    assert config.data.args == {"x": 1, "y": 2}
    assert config.data.val is not None
    assert config.data.val.args == {"x": 1, "y": 3}


def test_an_alias_of_itself_is_refused() -> None:
    Path("c.yaml").write_text("model:\n  args: &a\n    x: *a\n")
    assert refused("c.yaml") == "c.yaml:2: an alias (*) stands inside what it names"


def test_byte_order_mark_and_windows_line_ends() -> None:
    Path("c.yaml").write_bytes(b"\xef\xbb\xbftrain:\r\n  steps: 9\r\n")
    assert load("c.yaml").train.steps == 9


def test_dict_and_config_are_sources_too() -> None:
    assert load({"train": {"steps": 3}}).train.steps == 3
    assert load(Config(seed=5), ["train.steps=4"]) == Config(seed=5, train={"steps": 4})  # type: ignore[arg-type]
    assert refused({"train": {"stpes": 3}}) == (
        "unknown key 'train.stpes'; did you mean 'train.steps'?"
    )


def test_missing_file_names_the_nearest() -> None:
    Path("recipes").mkdir()
    Path("recipes/demo.yaml").write_text("seed: 1\n")
    assert refused("recipes/dmo.yaml") == (
        "recipes/dmo.yaml: no such file; did you mean 'recipes/demo.yaml'?"
    )
    assert refused("recipes/demo") == (
        "recipes/demo: no such file; did you mean 'recipes/demo.yaml'?"
    )
    assert refused("recipes/zebra.yaml") == (
        "recipes/zebra.yaml: no such file; the configs there are demo.yaml"
    )
    assert refused("other/demo.yaml") == (
        "other/demo.yaml: no such file; there is no folder 'other'"
    )
    assert refused("zebra.yaml") == "zebra.yaml: no such file"


def test_a_folder_is_not_a_config() -> None:
    Path("runs/demo").mkdir(parents=True)
    assert refused("runs/demo") == "runs/demo: is a folder, not a config file"
    Path("runs/demo/config.yaml").write_text("seed: 1\n")
    assert refused("runs/demo") == (
        "runs/demo: is a folder, not a config file; did you mean 'runs/demo/config.yaml'?"
    )


def test_files_that_are_no_text() -> None:
    Path("c.yaml").write_bytes(b"name: caf\xe9\n")
    assert refused("c.yaml") == ("c.yaml: not UTF-8 text (byte 0xe9 at offset 9); save it as UTF-8")
    Path("c.yaml").write_text("name: a\nseed: \x07\n")
    assert refused("c.yaml") == "c.yaml:2: the character '\\x07' may not stand in YAML"
    Path("c.toml").write_text("seed = 1\n")
    assert refused("c.toml") == "c.toml: a config file must end with .yaml, .yml, .json, .py"
    Path("deep.yaml").write_text("[" * 5000)
    assert refused("deep.yaml") == "deep.yaml: is nested more than 50 levels deep"


def test_what_the_system_says_is_passed_on() -> None:
    name = "c" * 1000 + ".yaml"
    assert refused(name) == f"{name}: cannot be read: File name too long"


def test_problems_of_file_and_overrides_come_together() -> None:
    Path("c.yaml").write_text("seed: [\n")
    assert refused("c.yaml", "bogus").split("\n") == [
        "c.yaml:2:1: not valid YAML: expected the node content, but found '<stream end>'",
        "--set bogus: must be key=value, like train.steps=100",
    ]


class TestPythonFile:
    def test_a_dict(self) -> None:
        Path("c.py").write_text("steps = 3 * 4\nconfig = {'train': {'steps': steps}}\n")
        assert load("c.py").train.steps == 12

    def test_a_config(self) -> None:
        Path("c.py").write_text(
            "from paceline.config import Config, Train\nconfig = Config(train=Train(epochs=2))\n"
        )
        assert load("c.py", ["seed=3"]) == Config(seed=3, train={"epochs": 2})  # type: ignore[arg-type]

    def test_it_imports_what_lies_beside_it(self) -> None:
        Path("conf").mkdir()
        Path("conf/numbers_beside.py").write_text("STEPS = 5\n")
        Path("conf/c.py").write_text(
            "from numbers_beside import STEPS\nconfig = dict(train=dict(steps=STEPS))\n"
        )
        assert load("conf/c.py").train.steps == 5

    def test_tuples_become_lists(self) -> None:
        Path("c.py").write_text("config = {'optimizer': {'args': {'betas': (0.9, 0.95)}}}\n")
        assert load("c.py").optimizer.args == {"betas": [0.9, 0.95]}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "config = {\n  'seed': 1,\n  'train': {'stpes': 3},\n}\n",
                "c.py:3: unknown key 'train.stpes'; did you mean 'train.steps'?",
            ),
            (
                "config = dict(\n  train=dict(\n    steps='3'))\n",
                "c.py:3: train.steps must be a whole number, 1 or more, or null; "
                "got the string '3'",
            ),
            (
                "from paceline.config import Config\nconfig = Config(sed=1)\n",
                "c.py:2: unknown key 'sed'; did you mean 'seed'?",
            ),
            ("cfg = {}\n", "c.py: defines no 'config' (a dict or a paceline Config); did you "
             "mean to call 'cfg' so?"),
            (
                "x = 1\n",
                "c.py: defines no 'config' (a dict or a paceline Config); a script that trains by "
                "itself runs with: paceline train --script c.py",
            ),
            ("config = 3\n", "c.py: 'config' must be a dict or a paceline Config; got int"),
            ("config = {\n", "c.py:1: not valid Python: '{' was never closed"),
            ("\nconfig = 1 / 0\n", "c.py:2: ZeroDivisionError: division by zero"),
            ("import sys\nsys.exit(3)\nconfig = {}\n", "c.py:2: SystemExit: 3"),
            (
                "import nowhere_to_be_found\nconfig = {}\n",
                "c.py:1: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
            ),
            (
                "config = {'model': {'target': 'a:b', 'args': {'x': {'y': [1, {2}]}}}}\n",
                "c.py:1: model.args: x.y[1] is a set, which a YAML file cannot hold; use "
                "numbers, strings, true/false, null, lists and mappings",
            ),
            (
                "config = {'model': {'target': 'a:b', 'args': {'x': {1: 2}}}}\n",
                "c.py:1: model.args: key 1 must be a string (in x)",
            ),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_said_with_its_line(self, text: str, message: str) -> None:
        Path("c.py").write_text(text)
        assert refused("c.py") == message
