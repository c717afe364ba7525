"""``paceline bench wire`` on real ranks: its trials, its recommendation, its mistakes and its end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from left_over import left_over
from paceline.bench.wire_report import lines_for, show
from paceline.bench.wire_request import (
    DEFAULT_FORMATS,
    WireChoice,
    WireRequest,
    read_wire_request,
)
from paceline.bench.wire_result import Trial, WireResult, WireSetting
from paceline.config import Config, load, resolve
from paceline.errors import ConfigError
from paceline.testing.hosts import Hosts, hosts_available

PATIENCE = 500
TINY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Sequential):
    def __init__(self, width=64, layers=2):
        inner = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(*inner, nn.Linear(width, 1))


def data(count=512, width=64, val=True):
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, width, generator=dice)
    targets = inputs[:, :4].sum(1, keepdim=True)
    train = TensorDataset(inputs, targets)
    return (train, TensorDataset(inputs[:64], targets[:64])) if val else train
"""
CONFIG = """
model: {target: "tiny_net:Net"}
data: {target: "tiny_net:data"}
loss: {target: "torch.nn.functional:mse_loss"}
optimizer: {name: sgd, lr: 0.02}
schedule: {name: constant, warmup_steps: 0}
batch: {global_batch: 16}
train: {steps: 5000}
launch: {nproc: 2, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny_net.py").write_text(TINY)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "bench", "wire", *arguments]


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={k: v for k, v in os.environ.items() if k != "COLUMNS"},
    )


def tiny(**changes: Any) -> Config:
    """A resolved config of the demo on two ranks."""
    return resolve(load({"launch": {"nproc": 2, "device": "cpu"}, **changes}), devices=0)


def request(config: Config | None = None, **changes: Any) -> WireRequest:
    asked: dict[str, Any] = {"formats": None, "steps": 50, "seconds": 60.0, **changes}
    return read_wire_request(config or tiny(), **asked)


def test_on_one_machine(folder: Path) -> None:
    done = bench(
        *("tiny.yaml", "--formats=fp16,topk:0.05,local:3", "--steps=9", "--seconds=120"),
        "--json=all.json",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "Each format trains 9 steps, or as many more as fit" in done.stderr
    data = json.loads((folder / "all.json").read_text())
    result = WireResult.from_dict({k: v for k, v in data.items() if k != "advice"})
    assert (result.steps, result.complete, result.setting.loss) == (9, True, "validation")
    assert result.setting.parameters == 2 * (64 * 64 + 64) + 65
    assert [trial.format for trial in result.trials] == ["none", "fp16", "topk:0.05", "local:3"]
    assert all(trial.measured for trial in result.trials)
    assert len({trial.losses[0] for trial in result.trials}) == 1, "from the same weights and data"
    for trial in result.trials:
        assert len(trial.losses) == len(trial.seconds) >= 9
        assert trial.loss_at_steps is not None
        assert trial.loss_at_steps < trial.losses[0]
    plain, fp16, topk, local = (trial.sent_per_step for trial in result.trials)
    # Of two ranks, each sends the other as much as it has; vectors travel as they are.
    assert plain == 4 * result.setting.parameters
    assert fp16 is not None
    assert fp16 == pytest.approx(plain / 2, rel=0.1)
    assert topk is not None
    assert topk < plain / 5
    assert local == pytest.approx(plain / 3, rel=0.1)
    assert [trial.meetings for trial in result.trials] == [None, None, None, 3]
    assert data["advice"]["format"] in {trial.format for trial in result.trials}
    assert re.search(r"^none +\S+ .?s +× 1 +32.8 KiB +÷ 1 ", done.stdout, re.MULTILINE)
    assert "recommended: " in done.stdout
    assert "9 steps are too few to judge convergence by" in done.stdout
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {
        *("tiny.yaml", "tiny_net.py", "all.json")
    }


def test_what_a_layout_refuses_is_listed_and_the_rest_is_tried(folder: Path) -> None:
    done = bench(
        *("tiny.yaml", "--layout=dp=2,zero=2", "--formats=powersgd:4,int8,local:5"),
        *("--steps=6", "--seconds=120", "--json=-", "--set", "data.args.val=false"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    trials = {trial["format"]: trial for trial in data["trials"]}
    assert "powersgd:4 factors whole matrices, but with zero=2" in trials["powersgd:4"]["refused"]
    assert "zero=2 spreads a model" in trials["local:5"]["refused"]
    assert not trials["int8"]["refused"]
    assert trials["int8"]["losses"][0] == trials["none"]["losses"][0]
    assert data["setting"]["loss"] == "training"
    # What plain sends is counted by the trial that replaces it.
    assert trials["none"]["sent_per_step"] > 3 * trials["int8"]["sent_per_step"]
    assert data["advice"]["format"] in ("none", "int8")


@pytest.mark.timeout(900)
@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
def test_on_a_slow_link_compression_pays(folder: Path) -> None:
    arguments = [
        *("tiny.yaml", "--nnodes=2", "--nproc=1", "--rdzv=host0:29400", "--wait=150"),
        *("--formats=topk:0.01", "--steps=5", "--seconds=120", "--json=-"),
        *("--set", "model.args={width: 256, layers: 4}", "--set", "data.args={width: 256}"),
    ]
    with Hosts(2) as hosts:
        hosts[1].rate(20)  # a step of plain takes 0.4 s
        running = [
            host.popen(
                command(*arguments),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
        ends = [process.communicate(timeout=500) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    found = [json.loads(out) for out, _ in ends]
    assert found[0] == found[1], "both machines tell the same"
    plain, topk = found[0]["trials"]
    assert sorted(found[0]["setting"]["machines"]) == ["host0", "host1"]
    assert plain["sent_per_step"] > 10 * topk["sent_per_step"]
    assert plain["step_seconds"] > topk["step_seconds"]
    assert topk["losses"][0] == plain["losses"][0]
    assert found[0]["advice"]["format"] == "topk:0.01"
    assert found[0]["advice"]["pays"]


def test_ctrl_c_shows_what_is_known(folder: Path) -> None:
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    running = subprocess.Popen(
        command("tiny.yaml", "--formats=fp16,int8", "--steps=200", "--seconds=600"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BENCH_TEST": tag},
    )
    assert running.stderr is not None
    said = ""
    while not re.search(r"^none: .* a step", said, re.MULTILINE):
        line = running.stderr.readline()
        assert line, said
        said += line
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=240)
    assert running.returncode == 130, said + err
    assert "Traceback" not in err
    assert re.search(r"^none +\S+ .?s ", out, re.MULTILINE)
    assert "stopped before all formats were tried" in out
    assert left_over("BENCH_TEST", tag) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny.yaml", "--nproc=1"], "one rank: nothing is sent"),
        (["tiny.yaml", "--set", "train.stepz=3"], "train.stepz"),
        (["nowhere.yaml"], "no such file"),
        (["tiny.yaml", "--json=no/where.json"], "there is no folder"),
        (["tiny.yaml", "--nnodes=1:2", "--rdzv=a:1"], "give one number, like --nnodes 2"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], said: str, folder: Path
) -> None:
    done = bench(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"formats": "int8,zip"}, "--formats: there is no format 'zip'"),
        ({"formats": "topk"}, "--formats: 'topk' needs its ratio, as in topk:0.01"),
        ({"formats": "local"}, "'local' needs its steps between two meetings"),
        ({"formats": "local:0"}, "every=0 must be a whole number, 1 or more"),
        ({"formats": "local:5:sum"}, "method='sum' must be one of average, diloco"),
        ({"formats": " , "}, "names none: give some"),
        ({"steps": 2}, "--steps 2: must be 5 or more"),
        ({"seconds": 0.0}, "--seconds 0: must be a number of seconds above 0"),
        ({"seconds": float("nan")}, "--seconds nan: must be"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        request(**changes)
    assert said in str(caught.value)


def test_no_data_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match="has dp=1: formats are about gradients that travel"):
        request(tiny(layout="tp=2"))


def test_default_formats_and_what_the_config_has() -> None:
    assert request().formats == DEFAULT_FORMATS
    own = request(tiny(compress={"format": "topk:0.001"}))
    assert own.formats == (*DEFAULT_FORMATS, "topk:0.001")
    rounds = request(tiny(local_steps={"every": 50, "method": "average"}))
    assert "local:50" in rounds.formats
    assert "local:10" not in rounds.formats
    assert rounds.refused == {}
    assert request(formats="int8,int8").formats == ("none", "int8"), "plain is always tried"


def test_request_goes_to_the_ranks_and_back() -> None:
    asked = request(formats="powersgd:2,local:5", config=tiny(layout="dp=2,zero=1"))
    assert set(asked.refused) == {"powersgd:2", "local:5"}
    back = WireRequest.from_json(asked.to_json())
    assert back == asked
    assert load(back.config).layout == "dp=2,zero=1"


def test_a_format_takes_the_place_of_what_the_config_has() -> None:
    config = tiny(
        compress={"format": "int8", "warmup_steps": 100, "rules": {"*.bias": "none"}},
    )
    plain, topk = WireChoice.parse("none").apply(config), WireChoice.parse("topk:0.1").apply(config)
    assert plain.compress.options().formats is None
    assert (topk.compress.format, topk.compress.warmup_steps) == ("topk:0.1", 0), "from the start"
    assert topk.compress.rules == {"*.bias": "none"}
    local = WireChoice.parse("local:5:average").apply(config)
    assert local.compress.options().formats is None
    assert (local.local_steps.every, local.local_steps.method) == (5, "average")
    # A config of rounds: other formats are tried without them.
    rounds = tiny(local_steps={"every": 50, "overlap": 20, "fragments": 10})
    assert WireChoice.parse("fp16").apply(rounds).local_steps.every is None
    short = WireChoice.parse("local:5").apply(rounds).local_steps
    assert (short.overlap, short.fragments) == (4, 5)
    short.options()


def test_lines_for_the_config() -> None:
    config = tiny(compress={"format": "int8", "warmup_steps": 100})
    lines = lines_for(WireChoice.parse("topk:0.1"), config)
    assert lines == ["compress:", "  format: topk:0.1", "  warmup_steps: 100"]
    lines = lines_for(WireChoice.parse("local:5:average"), config)
    assert lines == [
        *("local_steps:", "  every: 5", "  method: average", "compress:", "  format: none"),
    ]
    rounds = tiny(local_steps={"every": 50})
    both = lines_for(WireChoice.parse("sign"), rounds)
    assert both == ["compress:", "  format: sign", "local_steps:", "  every: null"]
    merged = {**rounds.model_dump(), "compress": {"format": "sign"}, "local_steps": {"every": None}}
    assert load(merged).compress.format == "sign"


def test_table() -> None:
    setting = WireSetting(
        ["left", "right"], [1, 1], "CPU", "gloo", "2.13", "m:M", 1000000, "dp=2", "training"
    )
    falling = [5 - n / 25 for n in range(60)]
    trials = [
        Trial("none", "", "", 0.4, 4e6, 3.0, 3.0, 60, None, falling, [0.4] * 60),
        Trial("topk:0.01", "", "", 0.04, 9e4, 3.0, 2.5, 600, None, falling, [0.04] * 60),
        Trial("powersgd:4", refused="not with zero=2"),
        Trial("sign", failed="its loss was not finite at step 7", losses=[5.0, 9.0]),
    ]
    console = Console(file=io.StringIO(), width=120)
    show(WireResult(setting, 60, trials, 0.41), tiny(), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("left (1 rank), right (1 rank); CPU, gloo, torch 2.13; m:M, 1,000,000 ")
    assert "training loss after 60 steps" in text
    assert re.search(r"topk:0.01 +40 ms +× 10 +87.9 KiB +÷ 44.4 +3 +2.5 +600 steps\n", text)
    assert re.search(r"none, again +410 ms\s", text)
    assert "not tried: powersgd:4: not with zero=2\n" in text
    assert "ended early: sign: its loss was not finite at step 7\n" in text
    assert "stopped before all formats were tried\n" in text
    assert "recommended: topk:0.01\n" in text
    assert text.endswith("for the config:\ncompress:\n  format: topk:0.01\n")
