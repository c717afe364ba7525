"""The helper process: collectives, the model's size, crashes, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import dump, load
from paceline.doctor.own_machine import speed_of
from paceline.doctor.prober import Prober
from paceline.testing.processes import command_line, pids, was_started_with

SMALL = "model.args={vocab_size: 256, context: 8, layers: 1, heads: 2, width: 8, dropout: 0.0}"


@pytest.fixture
def prober() -> Iterator[Prober]:
    helper = Prober()
    yield helper
    helper.close()


def test_versions_and_collectives(prober: Prober, tmp_path: Path) -> None:
    import torch

    assert prober.hello["torch"] == torch.__version__
    jobs = [
        prober.submit(
            "collective",
            60,
            backend="gloo",
            rank=rank,
            size=2,
            store={"file": str(tmp_path / "store")},
            prefix="pair",
            patience_s=60,
            interface="lo",
        )
        for rank in range(2)
    ]
    speed = speed_of(("a", "b"), "gloo", jobs)
    assert speed.error == ""
    assert speed.rate > 1e6
    assert 0 < speed.latency < 10


def test_rank_without_a_partner_is_an_error(prober: Prober, tmp_path: Path) -> None:
    job = prober.submit(
        "collective",
        60,
        backend="gloo",
        rank=0,
        size=2,
        store={"file": str(tmp_path / "store")},
        prefix="pair",
        patience_s=1,
        interface="lo",
    )
    speed = speed_of(("a", "b"), "gloo", [job])
    assert speed.error
    assert speed.rate == 0


def test_size_of_a_model_is_what_its_checkpoint_holds(prober: Prober) -> None:
    config = load(None, [SMALL])
    result = prober.submit("model_size", 240, config=dump(config)).result()
    from paceline.trainer.run import make_model

    model = make_model(config)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    parameters = sum(p.nbytes for p in model.parameters())
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["model_bytes"] == held
    # AdamW: two moments of each parameter, and a count of steps.
    assert 0 <= result["optimizer_bytes"] - 2 * parameters < 100 * len(list(model.parameters()))


def test_model_that_cannot_be_built_says_why(
    prober: Prober, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load({"model": {"target": "no_such_module_here:Model"}, "loss": None})
    result = prober.submit("model_size", 240, config=dump(config)).result()
    assert "no_such_module_here" in result["error"]


def test_what_is_no_store_is_found_out(prober: Prober) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        job = prober.submit(
            "visit", 2, host="127.0.0.1", port=port, keys={"doctor": "key"}, patience_s=1
        )
        assert "error" in job.result()


def test_helper_ends_with_its_owner() -> None:
    """SIGKILL: the owner could do nothing about it."""
    code = "import time; from paceline.doctor.prober import Prober; Prober().hello; time.sleep(600)"
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True); {code}"],
        stdout=subprocess.PIPE,
        env={**os.environ, "DOCTOR_TEST": tag},
    )

    def helpers() -> list[int]:
        return [
            pid
            for pid in pids()
            if "doctor.probe" in command_line(pid) and was_started_with(pid, "DOCTOR_TEST", tag)
        ]

    try:
        _wait_for(lambda: bool(helpers()))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    _wait_for(lambda: not helpers())


def _wait_for(condition: object) -> None:
    deadline = time.monotonic() + 240
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
