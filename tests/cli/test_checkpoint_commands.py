"""``paceline checkpoint …``, as a person runs it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.listing import list_checkpoints
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.cli import main

Answer = tuple[int, str, str]


class Terminal:
    """Runs ``paceline checkpoint`` with arguments; returns exit status, output and errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["paceline", "checkpoint", *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, before)
        assert isinstance(ended.value.code, int)
        return ended.value.code, *self._capsys.readouterr()

    def json(self, *arguments: str | Path) -> Any:
        status, printed, shown = self(*arguments, "--json")
        assert shown == ""
        return {"status": status, **json.loads(printed)}


@pytest.fixture
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture
def paceline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shared_memory: Path
) -> Terminal:
    monkeypatch.setattr("paceline.cli.checkpoint_list._SHARED_MEMORY", str(shared_memory))
    return Terminal(monkeypatch, capsys)


def save_step(where: str | Path, step: int, value: float | None = None) -> Checkpoint:
    filled = torch.full((4, 3), float(step if value is None else value))
    state = RankState(
        {
            "model/w": whole_part(filled),
            "model/b": whole_part(torch.ones(3)),
            "optimizer/w/exp_avg": whole_part(torch.zeros(4, 3)),
        },
        {"engine": {"step": step, "aliases": {"head": "w"}}},
    )
    info = {
        "time": "2026-01-31T14:25:01+00:00",
        "layout": "dp=2,zero=3",
        "world_size": 2,
        "reason": "every",
        "metrics": {"loss": 1 / step},
    }
    return save(Folder(where), step, state, info=info, group=None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 10, 20 and 30."""
    folder = tmp_path / "run"
    for step in (10, 20, 30):
        save_step(folder / "checkpoints", step)
    (folder / "config.yaml").write_text("train: {steps: 30}\n")
    return folder


def data_file(run: Path, step: int) -> Path:
    (found,) = (run / "checkpoints" / f"step-{step:09d}").glob("*.bin")
    return found


def flip(file: Path, at: int = 7) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# ------------------------------------------------------------------ ls


def test_ls_shows_what_a_person_wants_to_know(paceline: Terminal, run: Path) -> None:
    status, printed, shown = paceline("ls", run)
    assert (status, shown) == (0, "")
    head, *rows = printed.splitlines()
    assert head.split() == ["step", "size", "when", "layout", "ranks", "reason", "metrics", "state"]
    assert len(rows) == 3
    for word in ("30", "dp=2,zero=3", "2", "every", "loss 0.0333", "whole"):
        assert word in rows[-1]


def test_ls_takes_the_run_its_checkpoints_or_one_of_them(paceline: Terminal, run: Path) -> None:
    everything = paceline.json("ls", run)["checkpoints"]
    assert [one["step"] for one in everything] == [10, 20, 30]
    assert paceline.json("ls", run / "checkpoints")["checkpoints"] == everything
    one = paceline.json("ls", run / "checkpoints" / "step-000000020")["checkpoints"]
    assert one == everything[1:2]
    assert one[0]["bytes"] == data_file(run, 20).stat().st_size


def test_ls_says_what_is_unfinished_or_damaged(paceline: Terminal, run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-000000040").mkdir()
    save_step(folder, 50)
    flip(folder / "step-000000050" / "manifest.json", 200)
    save_step(folder, 60)
    data_file(run, 60).unlink()
    save_step(folder, 70)
    os.truncate(data_file(run, 70), 9)
    shutil.copytree(folder / "step-000000010", folder / "step-000000080")
    (folder / "step-000000004.pt").write_bytes(b"old")
    found = paceline.json("ls", run)["checkpoints"]
    assert [one["step"] for one in found] == [4, 10, 20, 30, 40, 50, 60, 70, 80]
    states = {one["name"]: (one["state"], one["problem"]) for one in found}
    for step in (10, 20, 30):
        assert states[f"step-{step:09d}"] == ("whole", "")
    assert states["step-000000040"] == ("unfinished", "it has no manifest")
    assert "expected hash" in states["step-000000050"][1]
    assert "is missing" in states["step-000000060"][1]
    assert "found 9" in states["step-000000070"][1]
    assert states["step-000000080"] == ("damaged", "its manifest is that of step 10")
    assert states["step-000000004.pt"][0] == "old"
    status, printed, _ = paceline("ls", run)
    assert status == 0
    assert "step-000000070: rank-00000-" in printed


def test_ls_of_a_run_that_has_not_saved(paceline: Terminal, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    status, printed, _ = paceline("ls", tmp_path)
    assert (status, printed) == (0, f"{tmp_path}: no checkpoint yet\n")


def test_urls_and_runs_that_save_to_one(paceline: Terminal, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/checkpoints"
    for step in (1, 2):
        save_step(url, step)
    (tmp_path / "config.yaml").write_text(f"checkpoint: {{where: '{url}', storage: {{}}}}\n")
    for where in ([url], [f"memory://{tmp_path.name}"], [tmp_path, "--follow"]):
        assert [one["step"] for one in paceline.json("ls", *where)["checkpoints"]] == [1, 2]
        assert paceline.json("verify", *where, "--all")["ok"]
        assert paceline.json("show", *where)["step"] == 2
    assert paceline.json("show", f"{url}/step-000000001")["step"] == 1
    assert paceline.json("prune", url, "--keep-last", "1")["deleted"] == ["step-000000001"]
    status, _, shown = paceline("ls", "memory://not/there")
    assert (status, shown) == (1, "memory://not/there does not exist, or is empty.\n")


def test_listing_parses_no_tensors_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = save_step(tmp_path, 1)
    many = {f"model/{number}": one.manifest.tensors["model/w"] for number in range(200)}
    manifest = Manifest(1, one.manifest.info, one.manifest.files, many)
    for step in range(1, 101):
        folder = tmp_path / f"step-{step:09d}"
        folder.mkdir(exist_ok=True)
        manifest.step = step
        (folder / "manifest.json").write_bytes(manifest.to_bytes())
    # A thousand of these take 0.1 s; parsing them whole would take ten times as long.
    monkeypatch.setattr("paceline.checkpoint.manifest.Manifest.from_bytes", None)
    assert [found.step for found in list_checkpoints(tmp_path)] == list(range(1, 101))


# ------------------------------------------------------------------ show


def test_show_the_newest_or_that_of_a_step(paceline: Terminal, run: Path) -> None:
    status, printed, _ = paceline("show", run)
    assert status == 0
    assert printed.startswith(f"{run}/checkpoints/step-000000030\n")
    lines = [line.split() for line in printed.splitlines()]
    assert ["layout", "dp=2,zero=3"] in lines
    assert ["model", "2", "15", "60", "B"] in lines
    assert ["optimizer", "1", "12", "48", "B"] in lines
    assert ["model/w", "[4,", "3]", "float32", "48", "B", "1"] in lines
    assert paceline.json("show", run, "--step", "10")["info"]["metrics"] == {"loss": 0.1}


def test_show_lists_the_largest_unless_told(paceline: Terminal, tmp_path: Path) -> None:
    tensors = {f"model/{size}": whole_part(torch.zeros(size)) for size in range(1, 15)}
    save(Folder(tmp_path), 1, RankState(tensors), info={}, group=None)
    _, printed, _ = paceline("show", tmp_path)
    assert "model/14 " in printed
    assert "model/4 " not in printed
    assert "the 10 largest; 4 more with --tensors" in printed
    _, printed, _ = paceline("show", tmp_path, "--tensors")
    assert "model/4 " in printed
    assert "--tensors" not in printed
    assert len(paceline.json("show", tmp_path)["tensors"]) == 14


# ------------------------------------------------------------------ verify


def test_verify_reads_every_byte(paceline: Terminal, run: Path) -> None:
    status, printed, _ = paceline("verify", run)
    assert status == 0
    assert printed.startswith(f"whole: {run}/checkpoints/step-000000030 (")
    flip(data_file(run, 10))
    assert paceline("verify", run)[0] == 0
    status, printed, _ = paceline("verify", run, "--all")
    assert status == 1
    assert printed.count("whole: ") == 2
    assert f"damaged: {run}/checkpoints/step-000000010\n" in printed
    assert "block at byte 0: expected " in printed
    answer = paceline.json("verify", run, "--step", "10")
    assert (answer["status"], answer["ok"]) == (1, False)
    (damage,) = answer["checkpoints"][0]["damages"]
    assert damage["file"] == data_file(run, 10).name
    assert len(damage["expected"]) == len(damage["found"]) == 32


def test_verify_names_missing_and_short_files(paceline: Terminal, run: Path) -> None:
    data_file(run, 10).unlink()
    size = data_file(run, 20).stat().st_size
    os.truncate(data_file(run, 20), size - 1)
    flip(run / "checkpoints" / "step-000000030" / "manifest.json", 150)
    (run / "checkpoints" / "step-000000040").mkdir()
    status, printed, _ = paceline("verify", run, "--all")
    assert status == 1
    assert "found no such file" in printed
    assert f"expected {size} bytes, found {size - 1} bytes" in printed
    assert "manifest.json is damaged" in printed
    status, printed, _ = paceline("verify", run / "checkpoints" / "step-000000040")
    assert (status, "holds no manifest.json" in printed) == (1, True)


def test_what_a_live_run_deletes_meanwhile_is_not_damaged(
    paceline: Terminal, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Folder(run / "checkpoints").get(10)
    read = type(first.storage).read_bytes

    def deleted_once_it_was_read(storage: Any, path: str) -> bytes:
        data = read(storage, path)
        if "step-000000010" in path:
            shutil.rmtree(first.path)
        return data

    monkeypatch.setattr(type(first.storage), "read_bytes", deleted_once_it_was_read)
    status, printed, shown = paceline("verify", run, "--all")
    assert (status, printed.count("whole: ")) == (0, 2)
    assert shown == f"{first.path} was deleted meanwhile\n"
    save_step(run / "checkpoints", 10)
    data_file(run, 10).unlink()
    assert [one.step for one in list_checkpoints(run)] == [20, 30]


# ------------------------------------------------------------------ diff


def test_diff_like_diff(paceline: Terminal, run: Path, tmp_path: Path) -> None:
    save_step(tmp_path / "other", 30)
    status, printed, _ = paceline("diff", run, tmp_path / "other")
    assert status == 0
    assert printed.endswith("bitwise-identical: 3 tensors and 1 object\n")
    status, printed, _ = paceline("diff", run, run, "--step-a", "10")
    assert status == 1
    lines = [line.split() for line in printed.splitlines()]
    assert ["model/w", "values", "float32", "[4,", "3]", "12", "20", "0.667"] in lines
    assert ["engine/step", "10", "30"] in lines
    assert "1 tensor and 1 value differ; 2 tensors and 0 objects are bitwise-identical" in printed
    assert paceline("diff", run, run, "--step-a", "10", "--only", "optimizer/*")[0] == 0
    answer = paceline.json("diff", run, run, "--step-a", "10")
    assert (answer["status"], answer["equal"]) == (1, False)
    assert answer["tensors"][0]["absolute"] == 20.0


def test_trouble_is_2_as_with_diff(paceline: Terminal, run: Path) -> None:
    status, printed, shown = paceline("diff", run, run, "--step-a", "15")
    assert (status, printed) == (2, "")
    assert "no checkpoint of step 15; it has steps 10, 20, 30." in shown
    flip(data_file(run, 30))
    assert paceline("diff", run, run)[0] == 2
    assert paceline("verify", run / "nowhere")[0] == 2


# ------------------------------------------------------------------ export and import


def test_export_and_import(paceline: Terminal, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    status, printed, _ = paceline("export", run, target, "--step", "20", "--dtype", "bfloat16")
    assert status == 0
    assert printed.startswith(f"wrote {target}: 3 tensors of step 20, ")
    found = load_file(target)
    assert sorted(found) == ["b", "head", "w"]
    assert torch.equal(found["head"], torch.full((4, 3), 20.0, dtype=torch.bfloat16))
    answer = paceline.json("export", run, tmp_path / "m.pt", "--format", "torch")
    assert (answer["tensors"], answer["step"]) == (3, 30)
    status, printed, _ = paceline("import", tmp_path / "m.pt", tmp_path / "new")
    assert status == 0
    assert printed.startswith(f"wrote {tmp_path}/new/step-000000000: 3 tensors, ")
    answer = paceline.json("import", target, tmp_path / "newer", "--part", "net")
    assert answer["tensors"] == 3
    assert "model/net.w" in paceline.json("show", tmp_path / "newer")["tensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["RUN", "TMP/m", "--format", "onnx"],
            "format 'onnx' must be one of safetensors, hf, torch",
        ),
        (["RUN", "TMP/m", "--format", "hf", "--max-shard", "large"], "'large' is no size in bytes"),
        (["RUN", "TMP/m", "--format", "hf"], "no Hugging Face config is known"),
        (["RUN", "TMP/run"], "is there already"),
        (["RUN", "TMP/m", "--dtype", "int4"], "give a floating-point one"),
    ],
)
def test_exports_that_cannot_be(
    paceline: Terminal, run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = [word.replace("RUN", str(run)).replace("TMP", str(tmp_path)) for word in arguments]
    status, printed, shown = paceline("export", *places)
    assert (status in (1, 2), printed) == (True, "")
    assert message in shown
    assert os.listdir(tmp_path) == ["run"]


def test_an_export_that_is_ended_leaves_nothing(
    paceline: Terminal, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert paceline("export", run, tmp_path / "m.safetensors")[0] == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["run"]


# ------------------------------------------------------------------ wrong places


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])
def test_places_without_checkpoints(paceline: Terminal, tmp_path: Path, command: str) -> None:
    file = tmp_path / "file.txt"
    file.write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "w.safetensors").write_text("")
    for where, message in {
        tmp_path / "no": "does not exist.",
        file: "is a file, not a folder of checkpoints.",
        tmp_path / "empty": "is no run folder and holds no checkpoints.",
        tmp_path / "w.safetensors": "Make a checkpoint of it: paceline checkpoint import",
    }.items():
        status, printed, shown = paceline(command, where)
        assert (status in (1, 2), printed) == (True, "")
        assert message in shown


def test_a_folder_of_runs_names_the_latest(paceline: Terminal, run: Path) -> None:
    status, _, shown = paceline("ls", run.parent)
    assert (status, f"The latest run in it is {run}." in shown) == (1, True)


def test_a_run_that_saves_to_another_folder(paceline: Terminal, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("checkpoint: {where: kept}\n")
    save_step(tmp_path / "kept", 5)
    assert [one["step"] for one in paceline.json("ls", tmp_path)["checkpoints"]] == [5]


def test_a_step_that_is_not_there(paceline: Terminal, run: Path) -> None:
    status, _, shown = paceline("show", run, "--step", "25")
    assert status == 1
    assert "holds no checkpoint of step 25; it has steps 10, 20, 30." in shown
    one = run / "checkpoints" / "step-000000010"
    status, _, shown = paceline("show", one, "--step", "20")
    assert (status, "is the checkpoint of step 10, not 20" in shown) == (1, True)


def test_old_checkpoints_point_to_import(paceline: Terminal, tmp_path: Path) -> None:
    (tmp_path / "step-000000007.pt").write_bytes(b"")
    status, _, shown = paceline("show", tmp_path)
    assert (status, f"import {tmp_path}/step-000000007.pt TARGET" in shown) == (1, True)


# ------------------------------------------------------------------ prune


def steps_in(run: Path) -> list[int]:
    return [one.step for one in Folder(run / "checkpoints").checkpoints()]


def test_prune_keeps_what_it_is_told(paceline: Terminal, run: Path) -> None:
    options = ["--keep-last", "1", "--keep-best", "1", "--metric", "loss", "--mode", "max"]
    answer = paceline.json("prune", run, *options, "--dry-run")
    assert answer["would_delete"] == ["step-000000020"]
    assert answer["kept"] == [10, 30]
    assert steps_in(run) == [10, 20, 30]
    status, printed, _ = paceline("prune", run, *options)
    assert status == 0
    assert "deleted step-000000020\n" in printed
    assert "deleted 1 checkpoint (" in printed
    assert printed.endswith("2 checkpoints stay\n")
    assert steps_in(run) == [10, 30]
    assert paceline("prune", run, "--keep-every", "30")[0] == 0
    assert steps_in(run) == [30]


def test_prune_removes_leftovers_alone_unless_told(paceline: Terminal, run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-000000040").mkdir()
    (folder / "step-000000040" / "rank-00000-0badcafe.bin").write_bytes(b"half")
    (folder / "step-000000010" / "rank-00000-0badcafe.bin").write_bytes(b"of an earlier attempt")
    answer = paceline.json("prune", run)
    assert sorted(answer["deleted"]) == [
        "step-000000010/rank-00000-0badcafe.bin",
        "step-000000040",
    ]
    assert steps_in(run) == [10, 20, 30]


def test_prune_verifies_what_stays_before_anything_goes(paceline: Terminal, run: Path) -> None:
    flip(data_file(run, 30))
    status, printed, shown = paceline("prune", run, "--keep-last", "1")
    assert (status, printed) == (1, "")
    assert "the newest that would stay, is damaged." in shown
    assert "Nothing was deleted." in shown
    assert steps_in(run) == [10, 20, 30]


def test_prune_leaves_damaged_ones_and_does_not_count_them(paceline: Terminal, run: Path) -> None:
    flip(run / "checkpoints" / "step-000000030" / "manifest.json", 150)
    status, _, shown = paceline("prune", run, "--keep-last", "1")
    assert status == 0
    assert "left alone, since it is damaged: " in shown
    assert steps_in(run) == [20, 30]


def test_prune_is_refused_while_a_run_has_the_folder(paceline: Terminal, run: Path) -> None:
    with Folder(run / "checkpoints").lock("training"):
        status, _, shown = paceline("prune", run, "--keep-last", "1")
        assert (status, "is in use by another run: training (process" in shown) == (1, True)
        assert paceline("prune", run, "--keep-last", "1", "--dry-run")[0] == 0
    assert steps_in(run) == [10, 20, 30]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-last", "0"], "at least 1 has to stay"),
        (["--keep-best", "2"], "by which metric"),
        (["--metric", "loss"], "Add --keep-best K"),
        (["--keep-best", "1", "--metric", "acc"], "no checkpoint was saved with the metric 'acc'"),
        (["--keep-best", "1", "--metric", "loss", "--mode", "up"], "it is 'min' or 'max'"),
        (["--keep-every", "0"], "it takes 1 or more"),
    ],
)
def test_prune_rules_that_make_no_sense(
    paceline: Terminal, run: Path, options: list[str], message: str
) -> None:
    status, _, shown = paceline("prune", run, *options)
    assert (status in (1, 2), message in shown) == (True, True)
    assert steps_in(run) == [10, 20, 30]


# ------------------------------------------------------------------ shared memory


def put_in_memory(run: Path, root: Path) -> None:
    """What a run that was killed leaves there: a snapshot of step 31."""
    tier = MemorySnapshots(run / "checkpoints", None, after=None, root=root)
    tier.snapshot(31, RankState({"model/w": whole_part(torch.ones(3))}))
    tier.wait()
    tier.close()


def test_snapshots_in_shared_memory(
    paceline: Terminal, run: Path, shared_memory: Path, tmp_path: Path
) -> None:
    put_in_memory(run, shared_memory)
    put_in_memory(tmp_path / "other", shared_memory)
    for where in (run, run / "checkpoints"):
        (found,) = paceline.json("ls", where)["memory"]
        assert (found["run"], found["steps"]) == (str(run / "checkpoints"), [31])
    assert "in shared memory: step 31 (" in paceline("ls", run)[1]
    assert paceline.json("prune", run)["memory"] == []
    assert (
        "would free in shared memory: step 31" in paceline("prune", run, "--memory", "--dry-run")[1]
    )
    assert len(os.listdir(shared_memory)) == 2
    assert "freed in shared memory: step 31" in paceline("prune", run, "--memory")[1]
    assert paceline.json("ls", run)["memory"] == []
    assert len(os.listdir(shared_memory)) == 1


# ------------------------------------------------------------------ on a terminal


class Keyboard(io.StringIO):
    """A terminal's input, on which somebody types."""

    def isatty(self) -> bool:
        return True


def test_prune_asks_a_person_first(
    paceline: Terminal, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Keyboard("n\n"))
    status, printed, shown = paceline("prune", run, "--keep-last", "1")
    assert (status, shown) == (1, "nothing was deleted\n")
    assert f"{run}/checkpoints/step-000000010\n" in printed
    assert "Delete these? [y/N]: " in printed
    assert steps_in(run) == [10, 20, 30]
    monkeypatch.setattr("sys.stdin", Keyboard("y\n"))
    assert paceline("prune", run, "--keep-last", "2")[0] == 0
    assert steps_in(run) == [20, 30]


def test_tables_and_bars_on_a_terminal(
    paceline: Terminal, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", Keyboard(""))
    monkeypatch.setenv("TERM", "xterm")
    status, printed, _ = paceline("ls", run)
    assert (status, "───" in printed, "whole" in printed) == (0, True, True)
    status, printed, shown = paceline("verify", run, "--all")
    assert (status, "━" in printed) == (0, False)  # the bar does not get into what is piped on
    assert "step 20" in shown
    status, printed, _ = paceline("prune", run, "--keep-last", "1", "--yes")
    assert (status, "Delete" in printed) == (0, False)
    assert steps_in(run) == [30]
