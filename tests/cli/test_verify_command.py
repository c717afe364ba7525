"""``paceline verify``: exit status, table, JSON, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from left_over import left_over
from paceline.cli import main
from paceline.prove import devices
from paceline.testing.pool import RankPool

SMALL = [
    "--set=model.args={vocab_size: 256, context: 8, layers: 1, heads: 2, width: 8, dropout: 0.2}",
    "--set=data.args.context=8",
]


def verify(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["paceline", "verify", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def test_sound_layouts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    layouts = ["--layout", "dp=2", "--layout", "dp=2,microbatch=2"]
    status = verify(
        *SMALL, *layouts, "--steps", "2", "--global-batch", "6", monkeypatch=monkeypatch
    )
    printed = capfd.readouterr()
    assert status == 0, printed
    assert "2 steps of 6 samples in fp64, against one process:" in printed.out
    assert printed.out.count("same") == 2
    assert "note: steps of 6 samples, not the config's 32 (--global-batch)" in printed.out
    assert "do not know the layout: they were on in every run" in printed.out
    assert printed.err == ""  # no terminal, no progress line
    assert list(tmp_path.iterdir()) == []


def test_spread_and_refused_layouts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A layout that is refused has a row of its own, and the others go on; exit status 1."""
    layouts = ["--layout=cp=2", "--layout=tp=4", "--layout=dp=1,pp=2,schedule=gpipe"]
    status = verify(
        *SMALL, *layouts, "--steps=1", "--global-batch=6", "--json", monkeypatch=monkeypatch
    )
    report = json.loads(capfd.readouterr().out)
    assert status == 1
    rows = [(row["layout"], row["outcome"], row["cause"]) for row in report["rows"]]
    assert rows[0] == ("dp=1,cp=2", "refused", "axis-not-available")
    assert rows[1][:2] == ("dp=1,tp=4", "refused")
    assert "2 heads" in report["rows"][1]["words"]
    assert rows[2] == ("dp=1,pp=2,schedule=gpipe", "same", None)


def test_a_plant_as_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--layout=dp=2", "--plant=missing-all-reduce", "--steps=1", "--json"]
    status = verify(*SMALL, *arguments, "--precision=run", monkeypatch=monkeypatch)
    report = json.loads(capfd.readouterr().out)
    assert status == 1
    assert (report["ok"], report["plant"], report["precision"]) == (
        False,
        "missing-all-reduce",
        "fp32",
    )
    (row,) = report["rows"]
    assert (row["layout"], row["verdict"], row["cause"]) == ("dp=2", "differs", report["plant"])
    assert row["first"]["kind"] == "gradient"
    assert row["first"]["step"] == 1
    assert row["difference"] > row["allowed"]


def test_list_plants(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from paceline.prove._planted import PLANTS

    assert verify("--list-plants", monkeypatch=monkeypatch) == 0
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(PLANTS)


WRONG = {
    (): "no layout to verify: name at least one, like --layout dp=2",
    ("--layout=dq=2",): "layout 'dq=2': 'dq' must be one of dp, zero, replicas, tp, pp, cp, ep. "
    'Write it like "dp=4,tp=2".',
    ("--layout=dp=0",): "layout: dp=0 must be 1 or more.",
    ("--layout=auto",): "layout 'auto' does not say how many ranks it takes. Write it like 'dp=2'.",
    (
        "--layout=dp=2,microbatch=x",
    ): "layout 'dp=2,microbatch=x': 'microbatch=x' must be microbatch=<whole number, 1 or more>.",
    (
        "--layout=dp=2,microbatch=17",
    ): "layout 'dp=2,microbatch=17': microbatch=17 must be at most 16, a rank's share of the "
    "global batch of 32 over dp=2",
    (
        "--layout=dp=4",
        "--global-batch=3",
    ): "layout 'dp=4': the global batch of 3 must be at least dp=4, or some ranks get no samples",
    ("--layout=dp=2", "--layout=dp=2"): "layout 'dp=2' is given twice",
    ("--layout=dp=2", "--timeout=0"): "--timeout 0: must be a number of seconds above 0",
    ("--layout=dp=2", "--steps=0"): "steps=0 must be a whole number, 1 or more.",
    ("--layout=dp=2", "--global-batch=0"): "global_batch=0 must be a whole number, 1 or more.",
    (
        "--layout=dp=2",
        "--precision=fp8",
    ): "--precision fp8: must be fp64, or run for the config's own",
    (
        "--layout=dp=2",
        "--plant=gremlin",
    ): "plant 'gremlin' must be one of missing-all-reduce, wrong-average, unscaled-loss, "
    "wrong-accumulation, skipped-microbatch, local-clip, double-sample, stale-parameter, "
    "stale-shard, stale-buffer, stale-tied-weight, shard-clip, wrong-copies, row-parallel-bias, "
    "missing-tp-reduce, untied-stages, pipeline-scale",
    (
        "--layout=dp=1",
        "--plant=wrong-average",
    ): "plant 'wrong-average' needs 2 data-parallel ranks or more, but layout 'dp=1' has 1",
    (
        "--layout=dp=2",
        "--plant=skipped-microbatch",
    ): "plant 'skipped-microbatch' needs accumulation, but layout 'dp=2' runs each rank's share of "
    "32 samples at once; add a microbatch, like 'dp=2,microbatch=1'",
    (
        "--layout=dp=2",
        "--plant=local-clip",
        "--set=train.clip_norm=null",
    ): "plant 'local-clip' needs clipping: set clip_norm (train.clip_norm)",
    (
        "--layout=tp=2",
        "--plant=untied-stages",
    ): "plant 'untied-stages' needs 2 pipeline ranks or more, but layout 'dp=1,tp=2' has 1",
    (
        "--layout=dp=2",
        "--plant=shard-clip",
    ): "plant 'shard-clip' needs ranks that hold parts of the model (zero, tp, pp), but on layout "
    "'dp=2' each rank holds them whole",
    (
        "--layout=dp=2,zero=3",
        "--plant=missing-all-reduce",
    ): "plant 'missing-all-reduce' needs zero=0, where ranks hold what they need whole, but layout "
    "'dp=2,zero=3' has zero=3",
    (
        "--layout=dp=2,schedule=zbv",
    ): "layout 'dp=2,schedule=zbv': schedule is that of a pipeline, but pp=1. Add pp=2 or more, or "
    "leave schedule out.",
    ("--layout=dp=2", "--device=gpu"): "device=gpu must be one of auto, cpu, cuda",
    (
        "--layout=dp=2",
        "--device=cuda",
    ): "device=cuda, but torch can use no GPU on this machine; use cpu, or a torch built for CUDA "
    "on a machine with a GPU",
    (
        "--layout=dp=2",
        "--share-gpu",
    ): "share_gpu needs a GPU, but torch can use none on this machine; leave it out",
    ("nowhere.yaml", "--layout=dp=2"): "nowhere.yaml: no such file",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_mistakes_are_named_before_any_process_starts(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(RankPool, "run", never)
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)  # an error about a missing config names those that are here
    status = verify(*arguments, monkeypatch=monkeypatch)
    printed = capfd.readouterr()
    assert printed.err.strip() == WRONG[arguments]
    assert status == 2
    assert printed.out == ""


def test_all_problems_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    layouts = ["--layout=dp=0", "--layout=dp=64", "--layout=tp=two"]
    assert verify(*layouts, monkeypatch=monkeypatch) == 2
    assert len(capfd.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    mark = f"verify-{os.getpid()}-{number}"
    process = subprocess.Popen(
        [Path(sys.executable).parent / "paceline", "verify", *SMALL, "--layout=dp=2"],
        env={**os.environ, "PROOF_MARK": mark, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("paceline-verify-*/main/0.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number, errors
    assert (printed, errors) == ("", "interrupted\n" if number == signal.SIGINT else "")
    assert left_over("PROOF_MARK", mark) == []
    assert list(tmp_path.glob("paceline-*")) == []  # torch leaves a cache folder of its own
