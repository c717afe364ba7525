"""Facts about the machine that the tests run on, gathered for real."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.doctor import facts_gpus, facts_host, links
from paceline.doctor.facts_config import gather_config
from paceline.doctor.facts_folders import Tokens, Wanted
from paceline.doctor.facts_network import (
    address_towards,
    gather_interfaces,
    gather_network,
    look_up,
)
from paceline.doctor.links import Echo, try_link
from paceline.doctor.multi_node import distinct_names
from paceline.network.round_robin import round_robin
from ports import free_port

# Names and interfaces.


def test_loopback_is_among_the_interfaces() -> None:
    assert "127.0.0.1" in {i.name: i.addresses for i in gather_interfaces()}["lo"]


def test_names_resolve_or_say_why_not() -> None:
    good, bad = look_up(["localhost", "no-such-machine.invalid"])
    assert good.addresses
    assert good.error == ""
    assert bad.addresses == ()
    assert bad.error


def test_network_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    network = gather_network("10.0.0.1")
    assert (network.host, network.address) == (socket.gethostname(), "10.0.0.1")
    assert network.gloo_variable == "eth9"
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"


# Connections and clocks.


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def test_reached_machine_tells_its_time(echo: Echo) -> None:
    link, clock = try_link("a", "b", "127.0.0.1", echo.port)
    assert link.outcome == "ok"
    assert clock is not None
    assert abs(clock.offset) <= clock.round_trip  # one and the same clock


def test_clock_that_is_ahead() -> None:
    server = Echo(now=lambda: time.time() + 100)
    _, clock = try_link("a", "b", "127.0.0.1", server.port)
    server.close()
    assert clock is not None
    assert clock.offset == pytest.approx(100, abs=5)


def test_refusal_is_told_from_silence() -> None:
    link, clock = try_link("a", "b", "127.0.0.1", free_port())
    assert (link.outcome, clock) == ("refused", None)


def test_connection_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link, clock = try_link("a", "b", "127.0.0.1", listener.getsockname()[1])
    assert (link.outcome, clock) == ("silent", None)


# Limits and versions.


def test_limits_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    limits = facts_host.gather_limits()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.files == (None if soft == resource.RLIM_INFINITY else soft)
    assert limits.threads == 3
    assert limits.cores == len(os.sched_getaffinity(0))
    assert limits.memory_total is not None
    assert limits.memory_free is not None
    assert 0 < limits.memory_free <= limits.memory_total


def test_the_launcher_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_host.gather_started_by().launcher == "none"
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = facts_host.gather_started_by()
    assert found.launcher == "Open MPI"
    assert "OMPI_COMM_WORLD_RANK" in found.variables
    assert found.where == "rank 1 of 2, which meet at 127.0.0.1:29500"
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    assert "OMPI_COMM_WORLD_SIZE is not" in facts_host.gather_started_by().problem


def test_control_group_limits_memory_and_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "memory.max": "1073741824",
        "memory.current": "900000000",
        "memory.stat": "anon 1\ninactive_file 400000000\n",
        "pids.max": "50",
        "pids.current": "7",
    }
    for name, value in values.items():
        (tmp_path / name).write_text(value + "\n")
    monkeypatch.setattr(facts_host, "_CGROUP", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    limits = facts_host.gather_limits()
    assert limits.memory_group == 1073741824
    assert limits.memory_free == 1073741824 - 500000000
    assert (limits.processes, limits.processes_used) == (50, 7)


def test_commit_of_a_folder(tmp_path: Path) -> None:
    assert facts_host.git_commit(str(tmp_path)) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = facts_host.git_commit(str(tmp_path))
    assert len(commit) == 12
    (tmp_path / "file").write_text("2")
    assert facts_host.git_commit(str(tmp_path)) == f"{commit}+"


# Folders.


def wanted(where: Path | str, key: str = "track.run_dir") -> Wanted:
    return Wanted(key, str(where), "://" in str(where), True)


def test_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    first = Tokens([wanted(tmp_path / "new" / "runs")], "t1")
    second = Tokens([wanted(tmp_path / "new" / "runs")], "t1")
    [folder] = first.write("a")
    assert folder.error == ""
    assert folder.free is not None
    assert folder.sync_seconds is not None
    second.write("b")
    assert [seen.ok for seen in first.read("a", ["b"])] == [True]
    for tokens in (first, second):
        tokens.clean_up()
    for tokens in (first, second):
        tokens.remove_folders()
    assert list(tmp_path.iterdir()) == []


def test_file_of_a_machine_that_writes_elsewhere_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.doctor.facts_folders._PATIENCE_S", 0.2)
    tokens = Tokens([wanted(tmp_path)], "t1")
    tokens.write("a")
    [seen] = tokens.read("a", ["b"])
    assert (seen.ok, seen.writer, seen.reader) == (False, "b", "a")
    tokens.clean_up()


def test_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tokens = Tokens([wanted(tmp_path / "file" / "runs")], "t1")
    [folder] = tokens.write("a")
    assert "file" in folder.error
    tokens.clean_up()


def test_store_behind_a_url() -> None:
    tokens = Tokens([wanted("memory://bucket/run", "checkpoint.where")], "t1")
    [folder] = tokens.write("a/1")
    assert (folder.error, folder.free, folder.is_url) == ("", None, True)
    assert [seen.ok for seen in tokens.read("b", ["a/1"])] == [True]
    tokens.clean_up()


# The config.


def test_what_a_config_asks_of_a_machine(tmp_path: Path) -> None:
    asked = gather_config(
        None,
        ["checkpoint.keep=4", "checkpoint.where=s3://bucket/run", "layout=dp=4,zero=3"],
        {"launch.nproc=4": "--nproc 4"},
    )
    assert asked.plan.problems == ()
    assert asked.plan.nproc == 4
    assert asked.plan.checkpoints_at_once == 5
    assert asked.plan.copies_of_state == 0.25
    assert [(f.key, f.is_url, f.holds_checkpoints) for f in asked.folders] == [
        ("track.run_dir", False, False),
        ("checkpoint.where", True, True),
    ]


def test_config_problems_are_in_the_users_words() -> None:
    asked = gather_config(None, ["layout=dp=3"], {"launch.nproc=2": "--nproc 2"})
    assert asked.config is not None
    [problem] = asked.plan.problems
    assert problem.startswith("--nproc 2: ") or "layout=dp=3" in problem
    missing = gather_config("no/such.yaml", [])
    assert missing.config is None
    assert "no/such.yaml" in missing.plan.problems[0]


def test_same_values_have_the_same_hash(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("train: {steps: 7}\nschedule: {warmup_steps: 1}\n")
    (tmp_path / "two.yaml").write_text("schedule: {warmup_steps: 1}\ntrain:\n  steps: 7\n")
    hashes = {gather_config(str(tmp_path / f"{name}.yaml"), []).hash for name in ("one", "two")}
    assert len(hashes) == 1
    assert gather_config(str(tmp_path / "one.yaml"), ["seed=1"]).hash not in hashes
    assert gather_config(str(tmp_path / "one.yaml"), ["launch.nproc=5"]).hash in hashes


# GPUs, as a stand-in for nvidia-smi tells of them.

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index,uuid*)
    echo "0, GPU-a, NVIDIA H200, 143771, 143000, 570.1, 0"
    echo "1, GPU-b, NVIDIA H200, 143771, 1000, 570.1, [N/A]" ;;
  --query-gpu=index,clocks_event*) exit 2 ;;
  --query-gpu=index,clocks_throttle*) echo "0, 0x0000000000000004"; echo "1, 0x0000000000000020" ;;
  --query-compute-apps*) echo "GPU-b, 4711, /usr/bin/python, 140000" ;;
esac
"""


def test_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = facts_gpus.gather_gpus()
    assert found.driver == "570.1"
    first, second = found.devices
    assert (first.users, first.uncorrected_errors, first.slowed_by) == ((), 0, "")
    assert second.users == ("4711 /usr/bin/python (137 GiB)",)
    assert (second.uncorrected_errors, second.slowed_by) == (None, "heat")
    assert second.memory_free == 1000 * 2**20


def test_driver_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'driver/library mismatch' >&2; exit 18\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts_gpus.gather_gpus().error == "nvidia-smi failed: driver/library mismatch"


# Who is measured with whom.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    plan = round_robin(range(count))
    pairs = [pair for one in plan for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for one in plan:
        members = [member for pair in one for member in pair]
        assert len(set(members)) == len(members)


def test_machines_have_distinct_names() -> None:
    assert distinct_names(["a", "b"], ["1", "2"]) == ["a", "b"]
    assert distinct_names(["a", "a", "b"], ["1", "2", "3"]) == ["a/1", "a/2", "b"]
    assert distinct_names(["a", "a"], ["1", "1"]) == ["a/1", "a/1#2"]
