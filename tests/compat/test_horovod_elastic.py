"""``hvd.elastic.run`` where an operation fails and all ranks are alive; and what is kept on disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.compat.horovod.common.commit_folder import CommitFolder
from paceline.compat.horovod.common.elastic import ObjectState, run_fn
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.launch.environment import RUN_DIR


class World:
    """Of one rank, which counts how often it was made anew."""

    def __init__(self, train: Callable[[ObjectState, int], Any]) -> None:
        self.resets = 0
        self.calls: list[int] = []
        self._train = train

    def run(self) -> Any:
        def calls(state: ObjectState) -> Any:
            self.calls.append(state.batch)  # type: ignore[attr-defined]
            return self._train(state, len(self.calls))

        state = ObjectState(lambda value, **_: value, lambda: 0, batch=0)
        return run_fn(calls, self._reset)(state)

    def _reset(self) -> None:
        self.resets += 1


def fails_at_once(state: Any, call: int) -> None:
    raise HorovodInternalError(f"grad: shapes differ, for the {call}. time")


def fails_after_a_commit(state: Any, call: int) -> None:
    state.batch = 7
    state.commit()
    raise HorovodInternalError("grad: shapes differ")


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (RUN_DIR, "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    # Commands that another test has called in this process leave their handlers.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("train", [fails_at_once, fails_after_a_commit])
@pytest.mark.parametrize(("given", "limit"), [(None, 3), ("0", 3), ("1", 1), ("5", 5)])
def test_a_failure_that_stays_ends_the_run(
    train: Any, given: str | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", given)
    world = World(train)
    with pytest.raises(HorovodInternalError, match=f"shapes differ.*{limit} times in a row"):
        world.run()
    assert world.resets == limit
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_failures_between_which_training_comes_further_have_no_limit() -> None:
    def train(state: Any, call: int) -> str:
        for _ in range(call):  # another number each time
            state.batch += 1
            state.commit()
        if call < 9:
            raise HorovodInternalError("a switch was restarted")
        return "done"

    world = World(train)
    assert world.run() == "done"
    assert world.calls == [0, 1, 3, 6, 10, 15, 21, 28, 36]


def test_a_request_to_leave_is_heard_after_a_failure_too(tmp_path: Path) -> None:
    def train(state: Any, call: int) -> None:
        if call == 1:
            raise HorovodInternalError("once")
        os.kill(os.getpid(), signal.SIGTERM)
        state.batch = 5
        state.commit()
        raise AssertionError("commit() leaves")

    with pytest.raises(SystemExit):
        World(train).run()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_machines_of_one_name_share_a_folder(tmp_path: Path) -> None:
    one, other = (CommitFolder(tmp_path, writes=True) for _ in range(2))
    left = tmp_path / f"000000000001-{os.uname().nodename}.commit.1-0.part"
    for content in (b"first", b"second"):
        left.write_bytes(b"of a process that was killed")
        one.write(content)
        other.write(content)
        assert one.newest() == one.number
        assert other.read(one.number) == content
    assert [place.name.partition("-")[0] for place in tmp_path.iterdir()] == ["000000000002"]
