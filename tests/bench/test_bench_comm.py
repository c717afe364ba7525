"""``paceline bench comm`` on real ranks: its numbers, its outputs, its mistakes and its end."""

from __future__ import annotations

import dataclasses
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
from bench_cases import made_up
from rich.console import Console

from left_over import left_over
from paceline.bench import comm
from paceline.bench.collectives import COLLECTIVES
from paceline.bench.comm_report import bar, left_out, show
from paceline.bench.comm_request import CommRequest
from paceline.bench.comm_result import CommResult
from paceline.bench.launching import read_place
from paceline.bench.plot import write_plot
from paceline.errors import ConfigError
from paceline.testing.hosts import Hosts, hosts_available
from paceline.world import World

pytestmark = pytest.mark.waits

PATIENCE = 500


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "bench", "comm", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={k: v for k, v in os.environ.items() if k != "COLUMNS"},
    )


@pytest.mark.world(2, 3)
def test_every_collective_is_measured(ranks, world_size):
    def job(text):
        said = []
        result = comm.run(World.current(), CommRequest.from_json(text), said.append)
        return result.to_dict(), said

    request = CommRequest(tuple(COLLECTIVES), (1000, 20000), seconds=0.01)
    results = ranks(job, request.to_json())
    assert all(result == results[0] for result in results), "every rank has the whole of it"
    result = CommResult.from_dict(results[0][0])
    assert result.left_out == []
    for name, collective in COLLECTIVES.items():
        cells = result.of("all", name)
        assert len(cells) == (2 if collective.moves_data else 1)
        for cell in cells:
            assert 0 < cell.p10 <= cell.median <= cell.p90
            assert cell.ranks == world_size
            assert cell.size % (4 * world_size) == 0
            assert cell.bus_bandwidth == pytest.approx(
                collective.factor(world_size) * cell.size / cell.median
            )
    [inside] = result.inside
    assert inside.pairs == world_size * (world_size - 1) // 2
    assert 1e6 < inside.slowest_bandwidth <= inside.bandwidth
    assert 0 < inside.latency < 0.5
    assert result.pairs == []
    assert list(result.links()) == ["within"]
    assert results[0][1][0] == "measuring all_reduce (all)"


@pytest.mark.world(2)
def test_what_takes_too_long_is_left_out_and_said(ranks):
    def job(text):
        return comm.run(World.current(), CommRequest.from_json(text), print).to_dict()

    # A call may take ten times as long as this: some microseconds, which none can keep to.
    request = CommRequest(("all_reduce",), (1024, 2048, 65536), seconds=1e-7, pairs=False)
    result = CommResult.from_dict(ranks(job, request.to_json())[0])
    assert [cell.size for cell in result.cells] == [1024]
    assert [one.size for one in result.left_out] == [2048, 65536]
    expected = [one.expected for one in result.left_out]
    assert min(expected) > 1e-6
    assert left_out(result)[0].startswith(
        "left out (all), as a call takes too long: all_reduce of 2 KiB ("
    )


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes(ranks, dtype):
    def job(text):
        return comm.run(World.current(), CommRequest.from_json(text), print).to_dict()

    request = CommRequest(
        ("all_reduce", "all_gather"), (4096,), dtype=dtype, seconds=0.01, pairs=False
    )
    result = CommResult.from_dict(ranks(job, request.to_json())[0])
    assert [cell.size for cell in result.cells] == [4096, 4096]


def test_one_machine(tmp_path: Path) -> None:
    done = bench(
        *("--nproc=2", "--device=cpu", "--seconds=0.02", "--sizes=4K,256K"),
        *("--collectives=all_reduce,barrier", "--json=all.json", "--plot=all.svg"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "all: all ranks" in done.stdout
    assert re.search(r"^all_reduce +256 KiB .*B/s", done.stdout, re.MULTILINE)
    assert re.search(r"^barrier +\S+ (µs|ms)", done.stdout, re.MULTILINE)
    assert re.search(r"^inside of \S+: \S+ [MG]B/s, ", done.stdout, re.MULTILINE)
    assert "reduction:" not in done.stdout, "a config would refuse one kind of link alone"
    assert "measuring all_reduce" in done.stderr
    assert "measuring" not in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "all.svg"}
    data = json.loads((tmp_path / "all.json").read_text())
    assert [cell["size"] for cell in data["cells"]] == [4096, 262144, 0]
    assert "<svg" in (tmp_path / "all.svg").read_text()


def test_table() -> None:
    console = Console(file=io.StringIO(), width=100)
    show(made_up(), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("left (2 ranks), right (2 ranks); CPU, gloo, float32, torch 2.13\n")
    assert re.search(r"within: the ranks of each machine, all machines at once\n.*slowest on", text)
    assert re.search(r"all_reduce +4 MiB +42.9 ms .* 97.7 MB/s +147 MB/s", text)
    assert re.search(r"all_reduce +across +1 ms +\+ size / 100 MB/s", text)
    assert re.search(r"left +· +12.5 MB/s 5 ms", text)
    assert re.search(r"right +12.6 MB/s 5 ms +·", text)
    assert 'within: "10 Gbit/s 0.05 ms"\n    across: "100 Mbit/s 5 ms"\n' in text
    assert "left out: gather (across): nccl says: no\n" in text
    assert "too long: reduce of 16 MiB (8 s), broadcast of 64 MiB (21 s)\n" in text
    assert "--seconds 2.1 would measure these as well\n" in text


def test_one_kind_of_link_is_nothing_for_a_config() -> None:
    """A config takes both or none."""
    for missing in ("pairs", "inside"):
        console = Console(file=io.StringIO(), width=100)
        show(dataclasses.replace(made_up(), **{missing: []}), console)
        assert "reduction:" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("gpus", "nproc", "said"),
    [
        (0, None, "--device cuda: torch finds no GPU that it can use on this machine"),
        (0, "2", "--device cuda: torch finds no GPU that it can use on this machine"),
        (2, "3", "there are 3 ranks, but this machine has 2 that torch can use; give --nproc 2"),
        (1, None, "1 rank on 1 machine: it takes two to talk."),
    ],
)
def test_one_error_where_gpus_are_too_few(
    gpus: int, nproc: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.config.devices.count_gpus", lambda: gpus)
    with pytest.raises(ConfigError) as caught:
        read_place(nproc=nproc, nnodes=None, rdzv=None, wait=60.0, device="cuda")
    (problem,) = caught.value.problems
    assert said in problem


def test_table_fits_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(made_up(), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"all_reduce +4 MiB +42.9 ms .* 97.7 MB/s +147 MB/s +█", text)


def test_bars() -> None:
    assert bar(0) == ""
    assert bar(1, 4) == "████"
    assert bar(0.5, 4) == "██"
    assert bar(1e-9, 4) == "▏", "little is not nothing"


def test_picture(tmp_path: Path) -> None:
    for kind, begin in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        path = tmp_path / f"picture{kind}"
        write_plot(made_up(), str(path))
        assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc=1", "--device=cpu"], "it takes two to talk. Give --nproc 2"),
        (["--nproc=none"], "--nproc none"),
        (["--nproc=2", "--sizes="], "--sizes '' names none"),
        (["--nproc=2", "--collectives=gather,shout"], "--collectives shout: must be one of"),
        (["--nproc=2", "--nnodes=2"], "needs launch.rdzv"),
        (["--nproc=2", "--nnodes=1:2", "--rdzv=a:1"], "give one number"),
        (["--nproc=2", "--group=across"], "--group across: that is one rank of each machine"),
        (["--nnodes=2", "--rdzv=a:1", "--nproc=1", "--group=within"], "--group within"),
        (["--nproc=2", "--wait=0"], "--wait 0: must be"),
        (["--nproc=2", "--json=no/where.json"], "there is no folder"),
        (["--nproc=2", "--plot=picture.txt"], "ending .png, .svg or .pdf"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = bench(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "measuring" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_interrupted(number: signal.Signals, status: int, tmp_path: Path) -> None:
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline", "bench", "comm", "--nproc=2", "--device=cpu"),
            "--seconds=60",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BENCH_TEST": tag},
    )
    assert running.stderr is not None
    assert "measuring all_reduce" in running.stderr.readline()
    running.send_signal(number)
    out, err = running.communicate(timeout=240)
    assert (running.returncode, out) == (status, ""), err
    assert "Traceback" not in err
    assert left_over("BENCH_TEST", tag) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)
@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
def test_a_slow_link_between_hosts_is_found(tmp_path: Path) -> None:
    arguments = [
        *("--nnodes=3", "--nproc=2", "--rdzv=host0:29400", "--wait=150", "--device=cpu"),
        *("--seconds=0.05", "--sizes=1K,256K", "--collectives=all_reduce", "--json=-"),
    ]
    with Hosts(3) as hosts:
        hosts[2].rate(100)
        running = [
            host.popen(
                [sys.executable, "-m", "paceline", "bench", "comm", *arguments],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
        ends = [process.communicate(timeout=400) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], ends
    found: list[dict[str, Any]] = [json.loads(out) for out, _ in ends]
    assert found[0] == found[1] == found[2], "all machines tell the same"
    result = CommResult.from_dict(found[0])
    assert sorted(result.setting.machines) == ["host0", "host1", "host2"]
    assert result.setting.ranks == [2, 2, 2]
    assert {kind: len(groups) for kind, groups in result.groups.items()} == {
        "all": 1,
        "within": 3,
        "across": 1,
    }
    assert [len(result.of(kind, "all_reduce")) for kind in result.groups] == [2, 2, 2]
    assert set(result.of("within", "all_reduce")[0].by_group) == {"host0", "host1", "host2"}
    # 100 Mbit/s are 12.5 MB/s, less what the packets' headers take; busy machines are slower.
    for pair in result.pairs:
        if "host2" in (pair.first, pair.second):
            assert 2e6 < pair.bandwidth < 16e6
        else:
            assert pair.bandwidth > 32e6
    links = result.links()
    assert links["across"].bandwidth < 16e6
    assert links["within"].bandwidth > 0  # how much, depends on what else the machine does
    console = Console(file=io.StringIO(), width=120)
    show(result, console)
    assert "all links of host2 are slow" in console.file.getvalue()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []
