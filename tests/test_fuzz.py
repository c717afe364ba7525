"""A slice of benchmarks/fuzz.py, and that it sees what it looks for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def fuzzing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from fuzzing import isolation

    if reason := isolation.unavailable():
        pytest.skip(reason)


def test_no_hostile_input_ends_in_a_traceback_a_hang_or_outside_of_its_folder() -> None:
    from fuzz import fuzz

    found = fuzz(24, seed=5, limit=60)  # on a machine that does other things, too
    assert found["bad"] == []
    assert sum(row["cases"] for row in found["kinds"].values()) == 24


def outcome_of(call: Callable[[Path], Any], folder: Path, limit: float = 120) -> dict[str, str]:
    from fuzzing.sandbox import run_case

    outside = folder / "outside"
    outside.mkdir()
    (outside / "victim").write_text("leave me alone")
    return run_case(lambda box: ([], lambda: call(box), []), folder, "box", outside, limit).wrong


def test_what_goes_well_is_not_wrong(tmp_path: Path) -> None:
    assert outcome_of(lambda box: print("well"), tmp_path) == {}


def test_a_traceback_is_seen(tmp_path: Path) -> None:
    assert "ZeroDivisionError" in outcome_of(lambda box: 1 / 0, tmp_path)["traceback"]


def test_a_hang_is_seen_and_ended(tmp_path: Path) -> None:
    assert list(outcome_of(lambda box: time.sleep(600), tmp_path, limit=1)) == ["hang"]


def test_escapes_are_seen(tmp_path: Path) -> None:
    assert "x1b" in outcome_of(lambda box: print("\x1b[2J"), tmp_path)["escapes"]


def test_a_file_outside_is_seen(tmp_path: Path) -> None:
    def write(box: Path) -> None:
        (box.parent / "outside" / "victim").write_text("mine")

    assert list(outcome_of(write, tmp_path)) == ["outside"]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGKILL])
def test_a_signal_to_another_process_is_seen(tmp_path: Path, number: int) -> None:
    assert list(outcome_of(lambda box: os.kill(2, number), tmp_path)) == ["signalled"]


def test_a_case_can_neither_write_on_the_machine_nor_signal_its_processes(tmp_path: Path) -> None:
    me, home = os.getpid(), Path.home()

    def attack(box: Path) -> None:
        (box / "here").write_text("the box is writable")
        for place in ("/dev/new", f"{home}/new", f"{sys.prefix}/new", "/tmp/new"):
            with pytest.raises(OSError, match=r"Read-only|No such"):
                Path(place).write_text("x")
        with pytest.raises(ProcessLookupError):
            os.kill(me, 0)

    assert outcome_of(attack, tmp_path) == {}
