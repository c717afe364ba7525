"""Pipeline schedules: the order torch executes, the times, the bubble, the pictures."""

from __future__ import annotations

import itertools
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from paceline.cli import main
from paceline.errors import LayoutError
from paceline.layout.pipeline_drawing import write_png
from paceline.layout.pipeline_schedules import (
    SCHEDULES,
    Costs,
    build_schedule,
    check_schedule,
    default_stages_per_rank,
    minimum_microbatches,
    placement,
)

TORCH_MULTI = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


class RecordingStage:
    """What torch's schedules ask of a stage; writes down what it is told to do."""

    def __init__(self, index: int, stages: int, rank: int, pp: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, pp
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = torch.nn.Identity()
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def _nothing(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def single_order(name: str, pp: int, microbatches: int, rank: int) -> list[str]:
    """What torch's one-stage schedules do, seen by running them: they have no order to read."""
    cls: Any = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}[name]
    stage = RecordingStage(rank, pp, rank, pp)
    schedule = cls(stage, microbatches)
    schedule._initialize_stage = lambda *args: None
    schedule._has_backward = True
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return stage.done


def multi_orders(name: str, pp: int, microbatches: int, per_rank: int) -> list[list[str]]:
    stages = [
        types.SimpleNamespace(
            **vars(RecordingStage(index, pp * per_rank, 0, pp)), stage_index_to_group_rank=None
        )
        for index in placement(name, pp, per_rank)[0]
    ]
    schedule: Any = TORCH_MULTI[name](stages, microbatches)  # type: ignore[arg-type]
    held = placement(name, pp, per_rank)
    assert schedule.stage_index_to_group_rank == {
        stage: rank for rank, stages in enumerate(held) for stage in stages
    }
    return [
        [
            str(part)
            for action in schedule.pipeline_order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(pp)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_in_torchs_order(name: str) -> None:
    for pp in (1, 2, 3, 4):
        for microbatches in (4, 5, 8):
            schedule = build_schedule(name, pp, microbatches)
            for rank in range(pp):
                ours = [str(action) for action in schedule.order(rank)]
                assert ours == single_order(name, pp, microbatches, rank)


@pytest.mark.parametrize("name", list(TORCH_MULTI))
def test_several_stages_a_rank_in_torchs_order(name: str) -> None:
    looped = name.startswith("interleaved")
    checked = 0
    for pp in (1, 2, 3, 4, 5):
        for per_rank in (1, 2, 3) if looped else (2,):
            for microbatches in range(1, 13):
                try:
                    expected = multi_orders(name, pp, microbatches, per_rank)
                except ValueError:
                    with pytest.raises(LayoutError):
                        check_schedule(name, pp, microbatches, per_rank)
                    continue
                schedule = build_schedule(name, pp, microbatches, per_rank)
                ours = [[str(action) for action in schedule.order(r)] for r in range(pp)]
                assert ours == expected, (pp, microbatches, per_rank)
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_runs_once_after_what_it_needs(name: str) -> None:
    pp, microbatches = 4, 8
    schedule = build_schedule(name, pp, microbatches, costs=Costs(p2p=0.25))
    times = {str(t.action): t for rank in schedule.ranks for t in rank}
    assert len(times) == sum(len(rank) for rank in schedule.ranks)
    home = {s: r for r, stages in enumerate(placement(name, pp)) for s in stages}
    for stage in range(schedule.stages):
        for microbatch in range(microbatches):
            forward = times[f"{stage}F{microbatch}"]
            split = times.get(f"{stage}I{microbatch}")
            backward = split or times[f"{stage}B{microbatch}"]
            assert backward.start >= forward.end
            if split:
                assert times[f"{stage}W{microbatch}"].start >= split.end
            if stage:
                way = 0.25 if home[stage] != home[stage - 1] else 0.0
                assert forward.start >= times[f"{stage - 1}F{microbatch}"].end + way
                before = (
                    times.get(f"{stage - 1}I{microbatch}") or times[f"{stage - 1}B{microbatch}"]
                )
                assert before.start >= backward.end + way
    for rank in schedule.ranks:
        assert all(a.end <= b.start for a, b in itertools.pairwise(rank))


def test_bubbles_by_hand() -> None:
    # The textbook's (p-1) / (m+p-1), whatever the costs, for GPipe and 1F1B; by 1/v interleaved.
    for name in ("gpipe", "1f1b"):
        assert build_schedule(name, 4, 8).bubble == pytest.approx(3 / 11)
        assert build_schedule(name, 4, 4, costs=Costs(3, 7)).bubble == pytest.approx(3 / 7)
    assert build_schedule("interleaved-1f1b", 4, 8, 2).bubble == pytest.approx(3 / (2 * 8 + 3))
    assert build_schedule("gpipe", 1, 5).bubble == 0
    assert build_schedule("zbv", 4, 16).bubble < build_schedule("interleaved-1f1b", 4, 16).bubble
    one_slow = build_schedule("gpipe", 2, 2, costs=Costs(forward=[1, 3], backward=[2, 2]))
    assert one_slow.makespan == 1 + 3 + 3 + 2 + 2 + 2
    assert one_slow.bubbles == pytest.approx([1 - 6 / 13, 1 - 10 / 13])


def test_live_microbatches() -> None:
    assert build_schedule("gpipe", 4, 8).most_live == [8, 8, 8, 8]
    assert build_schedule("1f1b", 4, 8).most_live == [4, 3, 2, 1]
    assert build_schedule("zbv", 4, 8).most_live == [8, 8, 8, 8]


def test_placement() -> None:
    assert placement("1f1b", 3) == [[0], [1], [2]]
    assert placement("interleaved-1f1b", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    assert placement("zbv", 3) == [[0, 5], [1, 4], [2, 3]]


def test_least_microbatches_are_enough_and_one_less_is_refused() -> None:
    for name in SCHEDULES:
        least = minimum_microbatches(name, 4)
        assert build_schedule(name, 4, least).microbatches == least
        if least > 1:
            with pytest.raises(LayoutError, match=f"microbatches={least - 1}.*at least"):
                check_schedule(name, 4, least - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F1B", 2, 4), "must be one of gpipe.*Did you mean '1f1b'"),
        (("1f1b", 4, 3), "microbatches=3.*at least one for each of its 4 stages"),
        (("1f1b", 4, 8, 2), "exactly 1 stage a rank, but stages_per_rank=2.*interleaved-1f1b"),
        (("zbv", 4, 8, 3), "exactly 2 stages a rank, but stages_per_rank=3"),
        (("interleaved-1f1b", 4, 9), "9 // 4 = 2 rounds.*multiple of pp=4.*or 8"),
        (("gpipe", 0, 3), "pp=0 must be"),
        (("gpipe", 2, 0), "microbatches=0 must be"),
    ],
)
def test_refusals_give_numbers_and_rule(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_schedule(*arguments)


def test_costs_are_checked() -> None:
    with pytest.raises(LayoutError, match=r"forward has 3 values.*4 stages"):
        build_schedule("gpipe", 4, 4, costs=Costs(forward=[1, 2, 3]))
    with pytest.raises(LayoutError, match="backward=-1 must not be negative"):
        build_schedule("gpipe", 4, 4, costs=Costs(backward=-1))


def test_table() -> None:
    lines = build_schedule("1f1b", 2, 3).table().splitlines()
    assert lines == [
        "1f1b: 2 ranks × 1 stage, 3 microbatches: bubble 25.0%, at most 1…2 live a rank",
        "rank 0  0F0 0F1 ... ... 0B0---- 0F2 0B1---- ... 0B2----   25.0% idle",
        "rank 1  ... 1F0 1B0---- 1F1 1B1---- 1F2 1B2---- ... ...   25.0% idle",
    ]
    odd = build_schedule("1f1b", 2, 3, costs=Costs(0.317, 0.723, p2p=0.011)).table(columns=40)
    assert "times are rounded" in odd
    assert all(f"{stage}B2" in odd for stage in (0, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures(name: str, tmp_path: Path) -> None:
    schedule = build_schedule(name, 2, 4)
    picture = ElementTree.fromstring(schedule.svg())
    titles = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert f"bubble {schedule.bubble:.1%}" in str(titles[0])
    assert len(titles) == 1 + sum(len(rank) for rank in schedule.ranks)
    assert schedule.stages_per_rank == default_stages_per_rank(name)
    write_png(schedule, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", "schedule", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    picture = tmp_path / "zbv.svg"
    status, printed, _ = run("zbv", "--stages", "4", "--microbatches", "4", "--svg", str(picture))
    assert status == 0
    table = build_schedule("zbv", 2, 4).table()
    assert printed.startswith(table)
    legend = printed.removeprefix(table).split()
    assert "F = forward, I = input gradient, W = weight gradient" in " ".join(legend)
    assert "B = backward" in (shown := run("1f1b", "--ranks", "2")[1])
    assert "weight gradient" not in shown, "only what it uses"
    assert run("--help")[1].count("forward") >= 2
    assert picture.read_text(encoding="utf-8") == build_schedule("zbv", 2, 4).svg()
    status, _, problem = run("1f1b", "--ranks", "4", "--microbatches", "2")
    assert status == 2
    assert "at least one for each of its 4 stages" in problem
    status, _, problem = run("interleaved-1f1b", "--ranks", "4", "--stages", "6")
    assert status == 2
    assert "--stages 6 must be a multiple of --ranks 4" in problem


@pytest.mark.parametrize(
    ("pp", "microbatches", "stages"),
    [
        (100_000, 8, None),
        (8, 100_000, None),
        (10**9, 10**9, None),
        (1, 1, 10**6),
        (10**30, 1, None),
    ],
)
@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b", "interleaved-zero-bubble"])
def test_a_schedule_too_large_to_be_laid_out_is_refused_at_once(
    name: str, pp: int, microbatches: int, stages: int | None
) -> None:
    if name == "gpipe" and stages is not None:
        stages = None
        microbatches = 10**6
    with pytest.raises(LayoutError, match=r"(256|8192) are the most"):
        build_schedule(name, pp, microbatches, stages)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), 1e300])
def test_costs_are_numbers_of_a_sound_size(cost: float) -> None:
    with pytest.raises(LayoutError, match="must be a number up to"):
        build_schedule("1f1b", 2, 2, costs=Costs(forward=cost))
