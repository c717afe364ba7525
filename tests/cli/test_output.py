"""What commands write: printable, and no answer where it cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.plain_checkpoints import put_checkpoint, put_manifest
from paceline.checkpoint.folder import Folder
from paceline.cli import main
from paceline.events import EventLog, NodeLeft, Note, RankLost, RanksStarted, RunFailed

EVIL = "\x1b[31mevil\x1b]0;title\x07\x9b2J\u202e"
Paceline = Callable[..., int]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch) -> Paceline:
    def run(*arguments: str, stdout: str | None = None) -> int:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        if stdout is not None:
            monkeypatch.setattr(sys, "stdout", _stream(stdout))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0

    return run


def _stream(kind: str) -> object:
    if kind == "full":
        return open("/dev/full", "w")
    if kind == "none":
        return None
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose every name and text tries to steer the terminal."""
    monkeypatch.chdir(tmp_path)
    folder = Folder(tmp_path / "run" / "checkpoints")
    folder.storage.make_folder()
    for step in (1, 2):
        tensors = {
            f"model/{EVIL}": torch.full((3,), float(step)),
            f"{EVIL}/\nwhole: x": torch.ones(1),
        }
        made = put_checkpoint(folder, step, tensors, {EVIL: {EVIL: step}}, metrics={EVIL: 1.0})
        info = {"layout": EVIL, "reason": EVIL, "time": EVIL, EVIL: [EVIL], **made.manifest.info}
        made.manifest.info.update(info)
        put_manifest(folder, step, made.manifest)
    log = EventLog(tmp_path / "run")
    log.write(RanksStarted(nproc=1, nodes=[EVIL, EVIL]))
    log.write(Note(message=EVIL, level="warning"))
    log.write(NodeLeft(host=EVIL, reason="lost"))
    lost = dict(cause="failed", error=EVIL, exit_code=1, step=1, log=EVIL)
    log.write(RankLost(rank=0, host=EVIL, **lost))
    log.write(RunFailed(rank=0, error=EVIL, exit_code=1))
    log.close()
    logs = tmp_path / "run" / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text(
        f"Traceback (most recent call last):\n  {EVIL}\nError: {EVIL}\n"
    )
    return tmp_path / "run"


def _is_harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoint", "ls", "run"],
        ["checkpoint", "ls", "run", "--json"],
        ["checkpoint", "show", "run", "--tensors"],
        ["checkpoint", "show", "run", "--json"],
        ["checkpoint", "verify", "run"],
        ["checkpoint", "diff", "run", "run", "--step-a", "1"],
        ["checkpoint", "prune", "run", "--keep-last", "1", "--dry-run"],
        ["checkpoint", "export", "run", "w.safetensors"],
        ["diagnose", "run", "--all"],
        ["diagnose", "run", "--json"],
        ["checkpoint", "ls", EVIL],
        ["diagnose", EVIL],
        ["schedule", EVIL],
    ],
)
def test_no_escape_reaches_the_terminal(
    command: list[str], run: Path, paceline: Paceline, capfd: pytest.CaptureFixture[str]
) -> None:
    paceline(*command)
    written = capfd.readouterr()
    assert _is_harmless(written.out), written.out
    assert _is_harmless(written.err), written.err
    assert written.out or written.err
    if "--json" in command:
        json.loads(written.out)
        assert "\\u001b[31mevil" in written.out


def test_damage_is_told_without_escapes(
    run: Path, paceline: Paceline, capfd: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-000000002"
    file = next(newest.glob("*.bin"))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert paceline("checkpoint", "verify", "run") == 1
    assert _is_harmless(capfd.readouterr().out)


@pytest.mark.parametrize(
    "command",
    [
        ["config", "schema"],
        ["config", "show"],
        ["checkpoint", "ls", "run"],
        ["checkpoint", "verify", "run", "--json"],
        ["diagnose", "run"],
        ["schedule", "1f1b"],
        ["--help"],
    ],
)
def test_output_that_cannot_be_written_is_no_answer(
    command: list[str], run: Path, paceline: Paceline, capfd: pytest.CaptureFixture[str]
) -> None:
    assert paceline(*command, stdout="full") == 2
    assert "No space left on device" in capfd.readouterr().err
    assert paceline(*command, stdout="closed") == 141
    assert capfd.readouterr().err == ""
    assert paceline(*command, stdout="none") == 0


def test_a_closed_pipe_does_not_look_like_damage_nor_like_a_difference(
    run: Path, paceline: Paceline
) -> None:
    shutil.copytree(run, "other")
    assert paceline("checkpoint", "diff", "run", "other", "--step-a", "1") == 1
    assert paceline("checkpoint", "diff", "run", "other", "--step-a", "1", stdout="closed") == 141


@pytest.mark.parametrize("path", ["no/such/folder/x.svg", "/dev/full", ".", "x" * 300])
def test_a_picture_that_cannot_be_written(
    path: str,
    paceline: Paceline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paceline("schedule", "1f1b", "--svg", path) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert path in said or "No space left" in said


def test_an_export_never_replaces_what_is_no_file(run: Path, paceline: Paceline) -> None:
    os.mkfifo("pipe")
    assert paceline("checkpoint", "export", "run", "pipe", "--force") == 1
    assert Path("pipe").is_fifo()
