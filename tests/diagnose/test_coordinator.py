"""When to ask, when to tell, when to act: over a board of plain dictionaries, with a clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from paceline.diagnose.hangs import coordinator as module
from paceline.diagnose.hangs.coordinator import (
    Coordinator,
    HangEnded,
    Standing,
    is_due,
    is_suspicious,
)
from paceline.diagnose.hangs.diagnosis import HangDiagnosis
from paceline.diagnose.hangs.mismatch import digest
from paceline.diagnose.hangs.rank_heartbeat import (
    SILENT,
    Call,
    GroupProgress,
    Heartbeat,
    RankReport,
)

AFTER = 10.0


class PlainBoard:
    """A board in this process's memory."""

    def __init__(self) -> None:
        self.signs: dict[int, Heartbeat] = {}
        self.answers: dict[int, RankReport] = {}
        self.called: dict[int, str] = {}
        self.questions = 0

    def beats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        return dict(self.signs)

    def digests(self, ranks: Iterable[int]) -> dict[int, str]:
        return dict(self.called)

    def ask(self) -> int:
        self.questions += 1
        return self.questions

    def answered(self, question: int, ranks: Iterable[int]) -> set[int]:
        return set(self.answers)

    def reports(self, question: int, ranks: Iterable[int]) -> dict[int, RankReport]:
        return dict(self.answers)


class Scene:
    """Two ranks, a coordinator and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.board = PlainBoard()
        self.told: list[HangDiagnosis | HangEnded] = []
        self.coordinator = Coordinator(self.board, 2, tell=self.told.append)  # type: ignore[arg-type]
        self.place = GroupProgress("gloo", "0", (0, 1), 4, 4)
        self.moves = 0

    def beat(self, rank: int, *, still: float, waits: bool = False, **changes: object) -> None:
        earlier = self.board.signs.get(rank)
        place = dataclasses.replace(self.place, begun=5) if waits else self.place
        beat = Heartbeat(
            rank=rank,
            world=(0, 1),
            number=0 if earlier is None else earlier.number + 1,
            host="here",
            pid=rank,
            after=AFTER,
            still=still,
            moves=self.moves,
            step=3,
            groups=(place,),
        )
        self.board.signs[rank] = dataclasses.replace(beat, **changes)
        self.board.answers[rank] = RankReport(
            rank=rank, seconds=still, step=3, groups=(place,), host="here"
        )

    def stand(self, seconds: float) -> None:
        """Rank 0 waits for rank 1, which does not move."""
        self.beat(0, still=seconds, waits=True)
        self.beat(1, still=seconds)
        self.coordinator.tick()
        self.coordinator.tick()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_nothing_is_asked_before_the_time(scene: Scene) -> None:
    scene.stand(AFTER - 0.1)
    assert (scene.board.questions, scene.told) == (0, [])


def test_a_hang_is_told_once(scene: Scene) -> None:
    scene.stand(AFTER)
    scene.stand(AFTER + 1)
    (finding,) = scene.told
    assert isinstance(finding, HangDiagnosis)
    assert finding.ranks == (1,)
    assert scene.board.questions == 1


def test_three_times_the_longest_step_is_waited(scene: Scene) -> None:
    scene.beat(0, still=20.0, waits=True, longest_step=7.0)
    scene.beat(1, still=20.0)
    scene.coordinator.tick()
    assert scene.board.questions == 0
    scene.beat(0, still=21.0, waits=True, longest_step=7.0)
    scene.coordinator.tick()
    assert scene.board.questions == 1


def test_a_rank_that_merely_computes_is_left_alone(scene: Scene) -> None:
    scene.beat(0, still=100.0)
    scene.beat(1, still=100.0)
    scene.coordinator.tick()
    assert scene.board.questions == 0


def test_a_late_rank_is_asked_about_and_left_alone(scene: Scene) -> None:
    scene.beat(0, still=AFTER, waits=True)
    scene.beat(1, still=0.5)
    for _ in range(3):
        scene.coordinator.tick()
    assert (scene.board.questions, scene.told) == (1, [])
    scene.now += AFTER  # and asked about again, but not at once
    scene.beat(0, still=2 * AFTER, waits=True)
    scene.beat(1, still=0.5)
    scene.coordinator.tick()
    assert scene.board.questions == 2


def test_a_silent_rank_is_spoken_for_or_given_up(scene: Scene) -> None:
    """No answer in time: what its last sign of life said stands, and that it is unreachable."""
    scene.beat(0, still=AFTER - 3, waits=True)
    scene.beat(1, still=AFTER - 3)
    scene.coordinator.tick()
    scene.now += 4.0
    scene.beat(0, still=AFTER + 1, waits=True)
    del scene.board.answers[1]
    scene.coordinator.tick()
    assert (scene.board.questions, scene.told) == (1, [])
    scene.now += 3.0
    scene.beat(0, still=AFTER + 4, waits=True)
    scene.coordinator.tick()
    (finding,) = scene.told
    assert isinstance(finding, HangDiagnosis)
    assert (finding.what, finding.ranks) == ("unreachable", (1,))


def test_the_end_of_a_hang_is_told_when_it_lasts(scene: Scene) -> None:
    scene.stand(AFTER)
    scene.moves += 1
    scene.beat(1, still=0.0)
    scene.beat(0, still=0.0)
    scene.coordinator.tick()
    assert len(scene.told) == 1
    scene.now += 1.5
    scene.beat(1, still=0.1)
    scene.coordinator.tick()
    over = scene.told[-1]
    assert isinstance(over, HangEnded)
    assert (over.step, over.seconds) == (3, AFTER)


def test_a_rank_on_its_way_out_is_no_movement(scene: Scene) -> None:
    """A collective that timed out raises: its rank moves, and leaves."""
    scene.stand(AFTER)
    scene.moves += 1
    scene.beat(0, still=0.0)
    scene.coordinator.tick()
    scene.now += 1.5
    scene.beat(0, still=0.0, left=True)
    scene.coordinator.tick()
    assert len(scene.told) == 1


def test_a_new_world_in_the_same_store_starts_afresh(scene: Scene) -> None:
    scene.stand(AFTER)
    scene.beat(0, still=0.0, world=(1, 1))
    scene.coordinator.tick()
    assert scene.coordinator.due() is None
    assert len(scene.told) == 1


def test_a_mismatch_is_told_although_nothing_hangs(scene: Scene) -> None:
    def said(dtype: str) -> str:
        return digest([Call("gloo", "0", (0, 1), 1, "all_reduce", ((4,),), (dtype,))], {})

    scene.board.called = {0: said("float32"), 1: said("int32")}
    scene.beat(0, still=0.0)
    scene.beat(1, still=0.0)
    scene.coordinator.tick()
    scene.coordinator.tick()
    (finding,) = scene.told
    assert isinstance(finding, HangDiagnosis)
    assert (finding.what, finding.seconds, finding.step) == ("mismatch", 0.0, 3)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ((), "Ranks 0 and 1 have not gone on from it so far: it may hang."),
        ((1,), "Rank 0 has not gone on from it so far: it may hang."),
        ((0, 1), "All of them have gone on from it."),
    ],
)
def test_a_mismatch_promises_nothing_that_a_hang_could_belie(
    scene: Scene, later: tuple[int, ...], said: str
) -> None:
    """It is told when it is seen, which may be long before a hang that comes of it."""
    for rank, op in enumerate(("all_reduce", "broadcast")):
        calls = [Call("gloo", "0", (0, 1), 1, op, ((4,),), ("float32",))]
        if rank in later:
            calls.append(Call("gloo", "0", (0, 1), 2, "barrier"))
        scene.board.called[rank] = digest(calls, {})
    scene.beat(0, still=0.0)
    scene.beat(1, still=0.0)
    scene.coordinator.tick()
    (finding,) = scene.told
    assert isinstance(finding, HangDiagnosis)
    assert said in finding.detail
    assert "othing hangs" not in finding.detail


def test_a_mismatch_seen_during_a_hang_is_told_after_it(scene: Scene) -> None:
    scene.stand(AFTER)
    test_calls = [Call("gloo", "1", (0, 1), 1, op) for op in ("barrier", "broadcast")]
    scene.board.called = {rank: digest([call], {}) for rank, call in enumerate(test_calls)}
    scene.coordinator.tick()
    assert len(scene.told) == 1
    scene.moves += 1
    for _ in range(3):
        scene.beat(0, still=0.0)
        scene.beat(1, still=0.0)
        scene.coordinator.tick()
        scene.now += 1.0
    assert [type(news) for news in scene.told] == [HangDiagnosis, HangEnded, HangDiagnosis]


def test_acting(scene: Scene) -> None:
    scene.stand(AFTER)
    assert scene.coordinator.due() is None
    scene.stand(2 * AFTER)
    assert scene.coordinator.due() is scene.told[0]


def finding(step: int | None, what: str = "code") -> HangDiagnosis:
    return HangDiagnosis(what, (1,), (0, 1), "", "", step, 0.0)


@pytest.mark.parametrize(
    ("step", "what", "seconds", "due"),
    [
        (5, "code", 2 * AFTER, True),
        (5, "code", 2 * AFTER - 1, False),
        (0, "code", 2 * AFTER, False),
        (None, "code", 2 * AFTER, False),
        (None, "code", 10 * AFTER, True),
        (5, "compiling", 100 * AFTER, False),
    ],
)
def test_when_something_must_be_done(
    step: int | None, what: str, seconds: float, due: bool
) -> None:
    assert is_due(finding(step, what), seconds, AFTER, AFTER) is due


def test_a_rank_that_left_is_not_suspicious() -> None:
    beat = Heartbeat(0, (0, 1), 1, "here", 1, AFTER, 50.0, 0, left=True, paced=True)
    assert not is_suspicious({0: Standing(beat, 50.0)}, AFTER)
    assert is_suspicious({0: Standing(dataclasses.replace(beat, left=False), 50.0)}, AFTER)


def test_silent_rank_that_stood_long_is_blamed(scene: Scene) -> None:
    scene.beat(0, still=AFTER, waits=True)
    scene.beat(1, still=AFTER)
    scene.board.answers[1] = dataclasses.replace(scene.board.answers[1], state=SILENT)
    scene.coordinator.tick()
    scene.coordinator.tick()
    (found,) = scene.told
    assert isinstance(found, HangDiagnosis)
    assert found.what == "native"
