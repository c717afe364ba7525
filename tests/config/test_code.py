"""Modules are found beside the config, then in the current folder; a run remembers where."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import (
    check,
    code_folders,
    code_notes,
    dump,
    import_target,
    load,
    load_checked,
    with_code,
)
from paceline.errors import ConfigError

NET = "class Net:\n    where = {!r}\n\n    def __init__(self, width=1):\n        pass\n"


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("own_net", "own_parts"):
        sys.modules.pop(name, None)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a config and its module; the current folder is another one."""
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project" / "own_net.py").write_text(NET.format("project"))
    (tmp_path / "project" / "c.yaml").write_text(
        "model: {target: 'own_net:Net'}\ntrain: {steps: 5}\n"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def found(config_file: Path) -> str:
    config = load(config_file)
    where: str = import_target(config.model.target, code_folders(config)).where
    return where


def test_a_module_beside_the_config_is_found_from_anywhere(project: Path) -> None:
    config = load_checked(project / "c.yaml", devices=0)
    assert found(project / "c.yaml") == "project"
    assert with_code(config).code == [str(project)]


def test_a_run_remembers_where_its_modules_were(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(with_code(load("../project/c.yaml"))))
    monkeypatch.chdir("/")
    assert check(load(run / "config.yaml"), devices=0) == []
    assert found(run / "config.yaml") == "project"
    assert with_code(load(run / "config.yaml")).code == [str(project)]


def test_the_current_folder_comes_second_and_is_remembered_too(project: Path) -> None:
    here = Path.cwd()
    (here / "own_parts.py").write_text("def data():\n    pass\n")
    (project / "c.yaml").write_text(
        "model: {target: 'own_net:Net'}\ndata: {target: 'own_parts:data'}\ntrain: {steps: 5}\n"
    )
    config = load_checked(project / "c.yaml", devices=0)
    assert with_code(config).code == [str(project), str(here)]
    assert code_notes(config) == []


def test_of_two_modules_the_one_beside_the_config_is_taken_and_named(project: Path) -> None:
    Path("own_net.py").write_text(NET.format("elsewhere").replace("width", "depth"))
    config = load_checked(project / "c.yaml", ["model.args={width: 3}"], devices=0)
    assert found(project / "c.yaml") == "project"
    assert code_notes(config) == [
        f"own_net is {project / 'own_net.py'}, not {Path.cwd() / 'own_net.py'}"
    ]


def test_folders_can_be_named(project: Path) -> None:
    (project / "src").mkdir()
    (project / "own_net.py").rename(project / "src" / "own_net.py")
    (project / "c.yaml").write_text(
        "code: [src]\nmodel: {target: 'own_net:Net'}\ntrain: {steps: 5}\n"
    )
    assert check(load(project / "c.yaml"), devices=0) == []
    assert found(project / "c.yaml") == "project"


def test_a_module_that_is_nowhere_is_told_with_where_it_was_looked_for(project: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_checked(project / "c.yaml", ["model.target=zzz:Net"], devices=0)
    assert f"there is no module 'zzz'; not in {project} or {Path.cwd()}, nor installed" in str(
        refused.value
    )


def test_what_is_installed_needs_no_folder(project: Path) -> None:
    (project / "c.yaml").write_text("seed: 1\n")
    assert with_code(load(project / "c.yaml")).code == []
