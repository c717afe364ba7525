"""`paceline.get_logger`: lines that say which rank they are from."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import paceline


def lines() -> list[str]:
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("of a test").addHandler(handler)
    paceline.get_logger("of a test").warning("%d steps", 3)
    paceline.get_logger("of a test", main_only=True).warning("once")
    paceline.get_logger("of a test").debug("not at this level")
    logging.getLogger("of a test").removeHandler(handler)
    return written


@pytest.mark.world(2)
def test_lines_say_which_rank_they_are_from(ranks: Any) -> None:
    assert ranks(lines) == [["[rank 0] 3 steps", "[rank 0] once"], ["[rank 1] 3 steps"]]


def test_before_a_world_is_joined_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.World, "joined", lambda: None)
    names = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert lines() == ["[rank 3] 3 steps"]
