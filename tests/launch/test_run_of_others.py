"""A run that a message describes: a launcher writes to folders that it was asked for, to no other,
and through no link in them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train_nodes import SharedRunFolder
from paceline.errors import ConfigError, LaunchError
from paceline.events import EventLog, Note
from paceline.launch import run_folder
from paceline.launch.logs import LogName
from paceline.launch.messages import BadMessage, decode, encode
from paceline.launch.rendezvous.membership import NodeMember, RunInfo
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder, has_mark
from paceline.track import mlflow

IDENTITY = "0123456789abcdef" * 2
NAME = "run-20250131-142501"
MINE = "model: mine\n"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_MARK_SECONDS", 0.0)
    monkeypatch.setattr(run_folder, "_LOCK_SECONDS", 0.0)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def nodes_for(
    choice: RunChoice, stack: contextlib.ExitStack, where: str | None = "s3://b"
) -> SharedRunFolder:
    nodes = SharedRunFolder(choice, config_text=MINE, checkpoint_where=where, stack=stack)
    nodes.is_over = lambda: True
    return nodes


def tree(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


@pytest.mark.parametrize(
    "identity", ["a/../precious", "../x", "", ".", "a\0b", "a\n", "a" * 65, "A/B", "ü"]
)
def test_an_identity_names_no_other_file(tmp_path: Path, identity: str) -> None:
    said: dict[str, Any] = {"path": "/runs/x", "identity": identity}
    with pytest.raises(BadMessage):
        decode(RunInfo, json.dumps(said))
    member = json.loads(encode(NodeMember("i", "h", "10.0.0.1", 2, 3)))
    with pytest.raises(BadMessage):
        NodeMember.from_json(json.dumps({**member, "run": said}))
    if "/" in identity or "\0" in identity:
        with pytest.raises(ValueError, match="no identity"):
            has_mark(tmp_path, identity)
        with pytest.raises(ValueError, match="no identity"):
            RunFolder(tmp_path).unmark(identity)


@pytest.mark.parametrize(
    "path",
    [
        "{0}/evil",
        "{0}/evil/" + NAME,
        "{0}/runs/../evil/" + NAME,
        "{0}/runs/" + NAME + "/../../evil",
        "{0}/runs/" + NAME + "/",
        "{0}/runs/" + NAME + "\n",
        "{0}/runs/other-20250131-142501",
        "{0}/runs/run-x",
        "{0}/runs",
        "runs/" + NAME,
        "",
        "\0",
    ],
)
@pytest.mark.parametrize("choice", ["root", "run_dir", "resume"])
def test_a_message_names_no_folder_but_ours(
    tmp_path: Path, stack: contextlib.ExitStack, path: str, choice: str
) -> None:
    evil = RunFolder(tmp_path / "evil")
    (evil.path / NAME).mkdir(parents=True)
    for folder in (evil.path, evil.path / NAME):
        (folder / "config.yaml").write_text("model: evil\n")
        (folder / ".lock").write_text("precious")
        (folder / f".seen-{IDENTITY}").touch()
    before = tree(tmp_path)
    choices = {
        "root": RunChoice(root=tmp_path / "runs"),
        "run_dir": RunChoice(run_dir=str(tmp_path / "mine")),
        "resume": RunChoice(resume=str(tmp_path / "mine")),
    }
    nodes = nodes_for(choices[choice], stack)
    with pytest.raises(ConfigError, match="the machines that meet here work on"):
        nodes.take(RunInfo(path.format(tmp_path), IDENTITY))
    stack.close()
    assert nodes.run is None
    assert tree(tmp_path) == before


@pytest.mark.parametrize("places", [("/etc",), ("{0}/precious",), ("{0}/a", "{0}/b"), ()])
def test_a_message_names_no_place_for_checkpoints(
    tmp_path: Path, stack: contextlib.ExitStack, places: tuple[str, ...]
) -> None:
    (tmp_path / "precious").mkdir()
    mark = tmp_path / "precious" / f".seen-{IDENTITY}"
    mark.touch()
    nodes = nodes_for(RunChoice(root=tmp_path / "runs"), stack, where=None)
    run = RunInfo(
        str(tmp_path / "runs" / NAME), IDENTITY, tuple(place.format(tmp_path) for place in places)
    )
    with pytest.raises(ConfigError, match="write checkpoints to"):
        nodes.take(run)
    stack.close()
    assert mark.exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["root", "run_dir", "resume"])
def test_the_folder_that_was_asked_for_is_taken(
    tmp_path: Path, stack: contextlib.ExitStack, kind: str, shared: bool
) -> None:
    path = tmp_path / "runs" / NAME
    choice = {
        "root": RunChoice(root=os.path.relpath(tmp_path / "runs")),
        "run_dir": RunChoice(run_dir=os.path.relpath(path)),
        "resume": RunChoice(resume=str(path)),
    }[kind]
    if shared:
        RunFolder(path).mark(IDENTITY)
        (path / "config.yaml").write_text("theirs")
    nodes = nodes_for(choice, stack)
    nodes.take(RunInfo(str(path), IDENTITY))
    assert nodes.run == RunFolder(path)
    assert nodes.shared is shared
    if shared:
        assert nodes.run.config.read_text() == "theirs"
    elif kind != "resume":
        assert nodes.run.config.read_text() == MINE
    stack.close()
    assert not has_mark(path, IDENTITY), "the run is over"


def test_what_one_launcher_makes_another_takes(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    for choice in (
        RunChoice(root=tmp_path / "runs", name="a.b+c"),
        RunChoice(run_dir=str(tmp_path / "x")),
    ):
        run = nodes_for(choice, stack, where=None).make()
        second = nodes_for(choice, stack, where=None)
        second.take(decode(RunInfo, encode(run)))
        assert second.shared


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / NAME
    RunFolder(path).mark(IDENTITY)
    theirs = os.stat_result([0o40755, 0, 0, 0, 12345, 12345, 0, 0, 0, 0])
    monkeypatch.setattr("paceline.launch.run_choice.os.lstat", lambda _: theirs)
    with pytest.raises(ConfigError, match=r"another user \(uid 12345\)"):
        nodes_for(RunChoice(root=tmp_path / "runs"), stack).take(RunInfo(str(path), IDENTITY))


def test_a_link_in_place_of_the_folder_is_refused(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    RunFolder(tmp_path / "evil").mark(IDENTITY)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / NAME).symlink_to(tmp_path / "evil")
    with pytest.raises(ConfigError, match="a link or a file is in the way"):
        nodes_for(RunChoice(root=tmp_path / "runs"), stack).take(
            RunInfo(str(tmp_path / "runs" / NAME), IDENTITY)
        )


# Files of a run folder that are none.


def test_a_pipe_is_no_mark_and_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".seen-{IDENTITY}")
    assert not has_mark(tmp_path, IDENTITY)
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(LaunchError, match="it is a pipe"), RunFolder(tmp_path).in_use():
        pass


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_to_where_a_link_leads(
    tmp_path: Path, stack: contextlib.ExitStack, exists: bool
) -> None:
    run, precious = RunFolder(tmp_path / "run"), tmp_path / "precious"
    log = LogName(1, 0).path(run.logs, "b")
    log.parent.mkdir(parents=True)
    if exists:
        precious.write_text("precious")
    before = tree(tmp_path)
    names = (".lock", ".config.yaml.part", "config.yaml", "config-1.yaml", "events.jsonl")
    links = [run.path / name for name in (*names, "mlflow.json", ".mlflow.json.part")]
    for link in (*links, log):
        link.symlink_to(precious)
    with pytest.raises(LaunchError, match="it is a link"), run.in_use():
        pass
    run.save_config("new")
    run.save_config("newer")
    with pytest.raises(OSError, match="it is a link"):
        EventLog(run.path).write(Note(message="x"))
    nodes = nodes_for(RunChoice(), stack)
    nodes.run = run
    with pytest.raises(OSError, match="it is a link"):
        nodes.keep_log(LogName(1, 0), "b", b"x")
    mlflow.MLflow(run_dir=run.path)._remember("id")
    assert run.config.read_text() == "newer"
    assert not run.config.is_symlink()
    assert tree(tmp_path).get("precious") == before.get("precious")


def test_odd_configs_are_not_read_without_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.save_config("a")
    os.mkfifo(tmp_path / "config-1.yaml")
    (tmp_path / "config-2.yaml").symlink_to("/dev/zero")
    run.save_config("b")
    assert run.config.read_text() == "b"
    assert (tmp_path / "config-3.yaml").read_text() == "a"
    run.config.unlink()
    run.config.symlink_to("/dev/zero")
    assert not run.has_config("b")
    with pytest.raises(LaunchError, match="it is a device"):
        run.save_config("c")


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"uri": "x", "run_id": 7}', "[" * 9999])
def test_what_mlflow_left_may_be_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / mlflow.STATE_FILE).write_text(text)
    client: Any = None
    with pytest.raises(ValueError, match=r"does not name a run|nested too deeply"):
        mlflow.MLflow(run_dir=tmp_path)._earlier_run(client)
