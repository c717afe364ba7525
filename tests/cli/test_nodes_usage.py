"""``paceline train`` for several machines: what is refused before anything starts, and said how."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import check, load, resolve
from paceline.config.endpoints import Endpoint, endpoints
from paceline.errors import ConfigError
from paceline.launch.run_folder import RunFolder, has_mark
from ports import free_port


def train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "train", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "2"], "--nnodes 2: launch.nnodes=2 needs launch.rdzv"),
        (["--nnodes", "2", "--rdzv", "node0"], "'node0' has no port"),
        (["--nnodes", "2", "--rdzv", "node0:99999"], "'99999' is not a port"),
        (["--nnodes", "2", "--rdzv", "a:1,,b:2"], "has no port"),
        (["--nnodes", "2", "--rdzv", "a:1,a:1"], "a:1 is named twice"),
        (["--rdzv", "node0:29400"], "launch.nnodes=1"),
        (["--nnodes", "3:2", "--rdzv", "node0:29400"], "neither a number of machines"),
        (
            ["--nnodes", "2", "--rdzv", "a:1", "--nproc", "2", "--layout", "dp=2"],
            "needs 2 ranks, but launch.nproc=2 on 2 machines, 4 in all",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = train(*arguments, "--set", "launch.device=cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_script_is_refused_as_well(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    done = train("--script", "s.py", "--nnodes", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "needs launch.rdzv" in done.stderr


def test_endpoints() -> None:
    assert endpoints("node0:29400, 10.0.0.2:1,[fe80::1]:2") == [
        Endpoint("node0", 29400),
        Endpoint("10.0.0.2", 1),
        Endpoint("fe80::1", 2),
    ]
    assert str(Endpoint("fe80::1", 2)) == "[fe80::1]:2"


def test_the_layout_is_that_of_all_machines() -> None:
    several = ["launch.nnodes=1:4", "launch.rdzv=a:1", "launch.device=cpu"]
    config = resolve(load(None, [*several, "launch.nproc=2"]), devices=0)
    assert (config.layout, config.launch.nproc) == ("dp=8", 2)
    config = resolve(load(None, [*several, "layout=dp=4,tp=2"]), devices=0)
    assert config.launch.nproc == 2
    odd = load(None, [*several, "layout=dp=6"])
    assert any("needs 6 ranks" in problem for problem in check(odd, devices=0))


def test_a_folder_is_for_the_launchers_of_one_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.in_use("run-a"), run.in_use("run-a"):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), run.in_use("b"):
            pass
        with pytest.raises(ConfigError, match="in use"), run.in_use():
            pass
    with run.in_use(), pytest.raises(ConfigError, match="in use"), run.in_use("run-a"):
        pass
    with run.in_use("run-b"):
        pass


def test_a_mark_tells_a_shared_folder_from_another(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    run.mark("abc", [other])
    assert has_mark(run.path, "abc")
    assert has_mark(other, "abc")
    assert not has_mark(other, "xyz")
    run.unmark("abc", [other])
    assert list(other.iterdir()) == []


def test_rendezvous_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "paceline", "rendezvous", "--port", port]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"--rdzv {os.uname().nodename}:{port}" in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
