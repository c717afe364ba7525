"""A run folder that came from others: looking at it connects to nowhere."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import paceline as library
from paceline.checkpoint.best import best_info
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.listing import list_checkpoints
from paceline.checkpoint.locate import find_checkpoint, find_folder
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.cli import main
from paceline.errors import CheckpointError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, before)
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A server that the folder's author chose; it would see anybody who comes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        yield server


@pytest.fixture
def received(tmp_path: Path, stranger: socket.socket) -> Path:
    folder = tmp_path / "received"
    folder.mkdir()
    storage = {"endpoint_url": "http://{}:{}".format(*stranger.getsockname())}
    config = {"checkpoint": {"where": "s3://bucket/run", "storage": storage}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def nobody_came(server: socket.socket) -> bool:
    try:
        server.accept()
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoint", "ls", "RUN"],
        ["checkpoint", "ls", "RUN", "--json"],
        ["checkpoint", "show", "RUN"],
        ["checkpoint", "verify", "RUN", "--all"],
        ["checkpoint", "verify", "RUN"],
        ["checkpoint", "diff", "RUN", "RUN"],
        ["checkpoint", "export", "RUN", "OUT.safetensors", "--best"],
        ["checkpoint", "prune", "RUN", "--keep-last", "1"],
        ["checkpoint", "prune", "RUN", "--keep-best", "1", "--memory", "--dry-run"],
    ],
    ids=" ".join,
)
def test_commands_stay_here_and_say_where_they_did_not_go(
    paceline: Run, received: Path, stranger: socket.socket, tmp_path: Path, command: list[str]
) -> None:
    words = [w.replace("RUN", str(received)).replace("OUT", f"{tmp_path}/out") for w in command]
    status, _, shown = paceline(*words)
    assert status != 0
    assert "'s3://bucket/run' (storage endpoint_url 'http://127.0.0.1:" in shown
    assert "was not looked at" in shown
    assert "--follow" in shown
    assert nobody_came(stranger)
    assert [path.name for path in tmp_path.iterdir()] == ["received"]


def test_diagnose_stays_here(paceline: Run, received: Path, stranger: socket.socket) -> None:
    (received / "events.jsonl").write_text("")
    paceline("diagnose", received)
    assert nobody_came(stranger)


def test_python_stays_here_too(received: Path, stranger: socket.socket) -> None:
    calls: list[Callable[[], object]] = [
        lambda: find_checkpoint(received),
        lambda: find_folder(received),
        lambda: list_checkpoints(received),
        lambda: library.load_weights(nn.Linear(1, 1), received),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="was not looked at"):
            call()
    assert nobody_came(stranger)


@pytest.mark.parametrize("where", ["/somewhere/else", "../other", "file:///somewhere/else"])
def test_other_folders_are_left_alone_too(paceline: Run, tmp_path: Path, where: str) -> None:
    """A received config could have prune delete in a folder of its choosing."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"checkpoint": {"where": where}}))
    status, _, shown = paceline("checkpoint", "prune", tmp_path, "--keep-last", "1")
    assert status == 1
    assert "is outside of the run's folder, and was not looked at" in shown


def make_run(folder: Path, where: Path) -> None:
    for step, accuracy in ((1, 0.9), (2, 0.4)):
        state = RankState({"model/weight": whole_part(torch.full((1, 1), float(step)))})
        info = {"metrics": {"accuracy": accuracy}, **best_info("accuracy", "max")}
        save(Folder(where), step, state, info=info, group=None)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"checkpoint": {"where": str(where)}}))


def test_a_folder_is_never_taken_for_a_url(
    paceline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec would open ``reference::refs.json``, and whatever that names."""
    (tmp_path / "config.yaml").write_text('checkpoint: {where: "reference::refs.json"}')
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": ["http://127.0.0.1:9/x"]}}')
    monkeypatch.chdir(tmp_path)
    status, out, err = paceline("checkpoint", "ls", ".")
    assert status != 0
    assert "was not looked at" in out + err


def test_links_that_lead_out_are_left_alone(paceline: Run, run: Path, tmp_path: Path) -> None:
    before = sorted(str(p) for p in run.rglob("*"))
    linked, named = tmp_path / "linked", tmp_path / "named"
    linked.mkdir()
    (linked / "checkpoints").symlink_to(run / "checkpoints")
    named.mkdir()
    (named / "config.yaml").write_text("checkpoint: {where: link}")
    (named / "link").symlink_to(run / "checkpoints")
    for folder in (linked, named):
        for command in (["ls"], ["verify", "--all"], ["prune", "--keep-last", "1", "--yes"]):
            status, out, err = paceline("checkpoint", command[0], folder, *command[1:])
            assert status != 0
            assert "was not looked at" in out + err
    assert sorted(str(p) for p in run.rglob("*")) == before
    assert paceline("checkpoint", "ls", linked, "--follow")[0] == 0


def test_on_request_they_are_looked_at(paceline: Run, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    make_run(run, elsewhere)
    assert "was not looked at" in paceline("checkpoint", "ls", run)[2]
    status, printed, _ = paceline("checkpoint", "ls", run, "--follow")
    assert (status, printed.count("whole")) == (0, 2)
    assert paceline("checkpoint", "verify", run, "--all", "--follow")[0] == 0
    assert paceline("checkpoint", "verify", elsewhere, "--all")[0] == 0
    model = nn.Linear(1, 1, bias=False)
    library.load_weights(model, run, "best", follow=True)
    assert model.weight.item() == 1.0
    assert paceline("checkpoint", "prune", run, "--keep-last", "1", "--follow")[0] == 0
    assert sorted(p.name for p in elsewhere.glob("step-*")) == ["step-000000002"]


# ------------------------------------------------------------------ the best of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, folder / "checkpoints")
    return folder


def test_the_best_weights_in_one_command(paceline: Run, run: Path, tmp_path: Path) -> None:
    status, printed, _ = paceline("checkpoint", "export", run, tmp_path / "best.pt", "--best")
    assert status == 0
    assert "1 tensor of step 1" in printed
    assert torch.load(tmp_path / "best.pt")["weight"].item() == 1.0
    paceline("checkpoint", "export", run, tmp_path / "last.safetensors")
    assert load_file(tmp_path / "last.safetensors")["weight"].item() == 2.0
    assert "  step         1\n" in paceline("checkpoint", "show", run, "--best")[1]
    assert "step-000000001" in paceline("checkpoint", "verify", run, "--best")[1]
    worst = paceline("checkpoint", "show", run, "--best", "--metric", "accuracy", "--mode", "min")
    assert "  step         2\n" in worst[1]
    assert "step 1" in paceline("checkpoint", "diff", run, run, "--best-a")[1]


def test_the_best_is_kept_as_the_run_was_told(paceline: Run, run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(run / "checkpoints", copied)
    dry = paceline("checkpoint", "prune", copied, "--keep-best", "1", "--dry-run")
    assert "would delete 0 checkpoints" in dry[1]
    other = paceline(
        "checkpoint", "prune", copied, "--keep-best", "1", "--mode", "min", "--dry-run"
    )
    assert "would delete step-000000001" in other[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "RUN", "--best", "--step", "1"], "--best and --step 1: which of them?"),
        (["show", "RUN", "--metric", "accuracy"], "--metric accuracy is for --best"),
        (["verify", "RUN", "--mode", "max"], "--mode max is for --best"),
        (["show", "RUN", "--best", "--metric", "speed"], "saved with the metric 'speed'"),
        (["export", "RUN", "TMP/m.pt", "--format", "safetensors"], "is for the format torch"),
        (["export", "RUN", "TMP/m.safetensors", "--format", "torch"], "for the format safetensors"),
        (["export", "RUN", "TMP/m.pth", "--format", "hf"], "is for the format torch"),
        (["export", "RUN", "TMP/m.onnx"], "in which format?"),
    ],
)
def test_contradictions_are_refused(
    paceline: Run, run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    words = [w.replace("RUN", str(run)).replace("TMP", str(tmp_path)) for w in arguments]
    status, printed, shown = paceline("checkpoint", *words)
    assert (status in (1, 2), printed) == (True, "")
    assert message in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.pt", "m.PTH", "m.bin", "m.ckpt", "m.safetensors", "m"])
def test_the_ending_of_the_name_decides(
    paceline: Run, run: Path, tmp_path: Path, name: str
) -> None:
    assert paceline("checkpoint", "export", run, tmp_path / name)[0] == 0
    load = load_file if name in ("m", "m.safetensors") else torch.load
    assert load(tmp_path / name)["weight"].item() == 2.0


def test_commands_with_a_key(
    paceline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TEST_KEY", "k" * 32)
    key = ["--key", "env:PACELINE_TEST_KEY"]
    torch.save({"weight": torch.ones(1, 1)}, tmp_path / "in.pt")
    assert paceline("checkpoint", "import", tmp_path / "in.pt", tmp_path / "c", *key)[0] == 0
    status, printed, _ = paceline("checkpoint", "ls", tmp_path / "c", *key)
    assert (status, "whole" in printed) == (0, True)
    assert "keyed" in paceline("checkpoint", "ls", tmp_path / "c")[1]
    status, _, shown = paceline("checkpoint", "verify", tmp_path / "c")
    assert (status, "was written with a key" in shown) == (2, True)
    assert paceline("checkpoint", "verify", tmp_path / "c", *key)[0] == 0
    assert "blake2b_keyed" in paceline("checkpoint", "show", tmp_path / "c", *key)[1]
    status, _, shown = paceline("checkpoint", "show", tmp_path / "c", "--key", "the key itself")
    assert (status, "must not stand here" in shown, "the key itself" in shown) == (2, True, False)
    model = nn.Linear(1, 1, bias=False)
    library.load_weights(model, tmp_path / "c", key="env:PACELINE_TEST_KEY")
    assert model.weight.item() == 1.0
