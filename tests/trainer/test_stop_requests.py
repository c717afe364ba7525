"""Signals to a rank while it trains."""

from __future__ import annotations

import os
import signal

import pytest

from paceline import World
from paceline.launch.launchers import LAUNCHER_PID
from paceline.trainer.stop_requests import LEAVE, StopRequests


@pytest.mark.parametrize("launched", [True, False])
def test_a_second_sigterm(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler sends it to all processes, and the launcher passes it on: still time to save."""
    if launched:
        monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with World.init(device="cpu") as world, StopRequests(world) as requests:
            os.kill(os.getpid(), signal.SIGTERM)
            assert requests.agree() == LEAVE
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ([] if launched else [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen[-1:] == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
