"""Doctors on several hosts (network namespaces), with faults that are really there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.secret import make_secret
from paceline.testing.hosts import Host, Hosts, hosts_available

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.timeout(900),
]

# Drops packets that open a TCP connection, as they leave; answers to others' connections pass.
# (Is it IPv4? TCP? SYN without ACK? Then 2, "shot".)
NO_CONNECTIONS_FROM_HERE = (
    "tc qdisc add dev eth0 clsact && tc filter add dev eth0 egress bpf da bytecode "
    "'9,40 0 0 12,21 0 5 2048,48 0 0 23,21 0 3 6,48 0 0 47,84 0 0 18,21 1 0 2,6 0 0 0,6 0 0 2'"
)

SMALL = [
    "--set=model.args={vocab_size: 256, context: 8, layers: 1, heads: 2, width: 8, dropout: 0.0}",
    "--set=data.args.context=8",
    "--nproc=1",
]


def examine(
    hosts: Sequence[Host],
    folder: Path,
    *arguments: str,
    own: dict[int, list[str]] | None = None,
    env: dict[int, dict[str, str]] | None = None,
) -> list[tuple[int, dict[str, Any]]]:
    """Exit status and report of a doctor on each host; ``own`` are arguments of one alone."""
    doctors = [
        host.popen(
            [
                *(sys.executable, "-m", "paceline", "doctor", "--json", *SMALL, *arguments),
                *(own or {}).get(number, []),
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {}).get(number, {})},
        )
        for number, host in enumerate(hosts)
    ]
    results = []
    for doctor in doctors:
        out, err = doctor.communicate(timeout=300)
        assert out, err
        results.append((doctor.returncode, json.loads(out)))
    return results


def problems(report: dict[str, Any]) -> dict[str, list[str]]:
    """What is not well, by check."""
    found: dict[str, list[str]] = {}
    for finding in report["findings"]:
        if finding["level"] != "ok":
            assert finding["fix"]
            found.setdefault(finding["check"], []).append(finding["found"])
    return found


def test_faults_are_named(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    make_secret(tmp_path / "secret")
    with Hosts(3, private=[private]) as hosts:
        done = hosts[0].run(["sh", "-c", NO_CONNECTIONS_FROM_HERE], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no packet filter in this kernel: {done.stderr}")
        hosts[2].rate(20)
        results = examine(
            hosts,
            tmp_path,
            *("--nnodes=3", "--rdzv=host0:29400", "--wait=120", "--secret-file=secret"),
            f"--set=track.run_dir={private}/runs",
            own={2: ["--set=seed=5"]},
            env={1: {"GLOO_SOCKET_IFNAME": "lo"}},
        )
    assert [status for status, _ in results] == [1, 1, 1]
    first = problems(results[0][1])
    assert [problems(report) for _, report in results] == [first] * 3  # all print the whole table
    one_way = [f"host0 → host{n} (10.99.0.{n + 1}:" for n in (1, 2)]
    assert [text[: len(way)] for text, way in zip(first["reach"], one_way, strict=True)] == one_way
    assert "no answer; the other way, host1 → host0, works" in first["reach"][0]
    assert "host1 ↔ host2: gloo moves" in first["speed"][0]
    assert "host1 does not see what host0 wrote" in first["shared"][0]
    assert "host1: Gloo would use lo" in first["interface"][0]
    assert "config differs" in first["versions"][0]
    assert "on host2" in first["versions"][0]
    assert set(first) == {"reach", "speed", "shared", "interface", "versions"}
    assert list(private.iterdir()) == []


def test_machine_that_cannot_come(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        hosts[2].cut()
        arguments = ("--nnodes=2:3", "--rdzv=host0:29400", "--wait=45")
        (first, report), (second, other), (cut_off, lonely) = examine(hosts, tmp_path, *arguments)
    assert (first, second) == (0, 0), problems(report)  # two are enough
    assert problems(report) == problems(other)
    assert set(problems(report)) == {"meeting"}
    assert "2 of 3 came: host0, host1" in problems(report)["meeting"][0]
    assert "without a secret" in problems(report)["meeting"][1]
    [speed] = report["facts"]["speeds"]
    assert speed["rate"] > 10e6
    assert cut_off == 1
    assert "host0:29400" in problems(lonely)["meeting"][0]
    assert list(tmp_path.iterdir()) == []
