"""docs/guides/checkpoints.md: its configs load, its code runs, its options are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.main import get_command

from paceline.checkpoint.listing import list_checkpoints
from paceline.cli.checkpoint import app
from paceline.config import check, load

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_example_loads_and_passes_every_check(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STORE_KEY", "a name")
    monkeypatch.setenv("CHECKPOINT_KEY", "a key of 16 bytes or more")
    (tmp_path / ".store-secret").write_text("a secret")
    (tmp_path / ".store-secret").chmod(0o600)
    file = tmp_path / "example.yaml"
    file.write_text(text)
    assert check(load(file), devices=0) == []


def test_the_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    functions, loop = blocks("python")
    exec(compile(functions, "guide", "exec"), {"__name__": "guide"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("0 whole ")
    assert printed[1:] == ["[]", "torch.Size([2])", "True"]
    assert str(load_file("linear.safetensors")["weight"].dtype) == "torch.float16"
    exec(compile(loop, "guide", "exec"), {"__name__": "guide"})
    assert [one.step for one in list_checkpoints("runs/loop")] == [4, 8]


def test_every_command_and_every_option_is_there() -> None:
    known = {
        name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    assert set(re.findall(r"^\| `(\w+) [A-Z]", TEXT, flags=re.MULTILINE)) == set(known)
    for line in re.findall(r"^\$ paceline checkpoint (.*)$", TEXT, flags=re.MULTILINE):
        name, *words = line.split()
        assert {word for word in words if word.startswith("--")} <= known[name]
    options = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert options <= set().union(*known.values())
