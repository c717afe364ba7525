"""assert_same, the small models, and faults."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import RankFailed
from paceline.testing import (
    FaultPlan,
    InjectedFault,
    assert_same,
    delay_at,
    exit_at,
    hang_at,
    kill_at,
    make_images,
    make_mlp,
    make_resnet,
    make_vectors,
    processes,
    raise_at,
)
from paceline.testing.faults import PlannedFault

NAN = math.nan
SAME = [
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    (torch.zeros(0, 3), torch.zeros(0, 3)),
    ({"a": [torch.ones(2), 1, "x", None]}, {"a": [torch.ones(2), 1, "x", None]}),
    (1, 1.0),
    (NAN, NAN),
    ((1, 2), [1, 2]),
    (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn)),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_same_things_are_same(a, b):
    assert_same(a, b)


DIFFERENT = [
    (torch.zeros(3), torch.tensor([0.0, 0.5, 0.25]), "value: 2 of 3 elements differ, most at [1]: 0.0 against 0.5"),
    (torch.tensor(1.0), torch.tensor(NAN), "value: 1 of 1 elements differ, most: 1.0 against nan"),
    (torch.zeros(2), torch.zeros(3), "value: torch.float32 (2,) against torch.float32 (3,)"),
    (torch.zeros(2), torch.zeros(2).half(), "value: torch.float32 (2,) against torch.float16 (2,)"),
    ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1]: 2 against 3"),
    ({"a": 1, "b": 2}, {"a": 1}, "b: only in the first"),
    ({"a": 1}, {"a": 1, "b": 2}, "b: only in the second"),
    ([1, 2], [1], "value: 2 items against 1"),
    (2**60, 2**60 + 1, f"value: {2**60} against {2**60 + 1}"),
    (True, 1, "value: a bool against a int"),
    ("x", "y", "value: 'x' against 'y'"),
    (torch.ones(1), [1.0], "value: a Tensor against a list"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "message"), DIFFERENT)
def test_the_first_difference_is_named(a, b, message):
    with pytest.raises(AssertionError) as caught:
        assert_same(a, b)
    assert str(caught.value) == message + " (allowed: bitwise-identical)"


def test_tolerances_count():
    assert_same(torch.tensor([1.0]), torch.tensor([1.05]), atol=0.1)
    assert_same({"loss": 100.0}, {"loss": 101.0}, rtol=0.02)
    with pytest.raises(AssertionError, match=r"loss: 100.0 against 103.0 \(allowed: rtol=0.02"):
        assert_same({"loss": 100.0}, {"loss": 103.0}, rtol=0.02)


def test_modules_are_compared_by_their_state():
    a, b = make_mlp(), make_mlp()
    assert_same(a, b)
    with torch.no_grad():
        b[2].bias[1] += 1
    with pytest.raises(AssertionError, match=r"^2\.bias: 1 of 4 elements differ, most at \[1\]"):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("make_model", "make_data"), [(make_mlp, make_vectors), (make_resnet, make_images)]
)
def test_small_models_learn_and_are_the_same_every_time(make_model, make_data):
    before = torch.get_rng_state()
    model, data = make_model(dtype=torch.float64), make_data(64, dtype=torch.float64)
    assert_same(model, make_model(dtype=torch.float64))
    assert_same(data.tensors, make_data(64, dtype=torch.float64).tensors)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(AssertionError):
        assert_same(model, make_model(seed=1, dtype=torch.float64))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_resnet_has_batch_normalisation():
    kinds = [type(module) for module in make_resnet().modules()]
    assert torch.nn.BatchNorm2d in kinds


@pytest.mark.world(2)
def test_faults_hit_the_planned_rank_at_the_planned_step(ranks):
    def job(plan):
        for step in range(5):
            plan.reach(step)
        return "through"

    fatal = {
        kill_at(rank=1, step=3): "rank 1 of 2 died: killed by SIGKILL",
        exit_at(rank=0, step=2, exit_code=7): "rank 0 of 2 died: exit code 7",
        raise_at(rank=1, step=0): "rank 1 of 2 raised paceline.testing.faults.InjectedFault",
    }
    for fault, message in fatal.items():
        with pytest.raises(RankFailed) as caught:
            ranks(job, FaultPlan(fault))
        assert str(caught.value).startswith(message)
        if fault.action == "raise":
            assert isinstance(caught.value.__cause__, InjectedFault)

    for limit in (1, 10, 60):  # a busy machine may need longer until the other is done
        with pytest.raises(RankFailed) as caught:
            ranks(job, FaultPlan(hang_at(rank=0, step=4)), timeout=limit)
        if "(rank 1 had finished)" in str(caught.value):
            break
    assert str(caught.value).startswith(f"rank 0 of 2 did not finish within {limit} s")

    harmless = FaultPlan(
        kill_at(rank=1, step=5), kill_at(rank=2, step=1), kill_at(rank=0, step=0, attempt=1)
    )
    assert ranks(job, harmless) == ["through"] * 2


def test_a_delay_delays_and_an_unknown_fault_is_refused():
    start = time.monotonic()
    FaultPlan(delay_at(rank=0, step=1, seconds=0.05)).reach(1)
    assert time.monotonic() - start >= 0.05
    with pytest.raises(ValueError, match="no such fault: 'explode'"):
        FaultPlan(PlannedFault("explode", 0, 0)).reach(0)


def test_a_fault_belongs_to_one_attempt(monkeypatch):
    plan = FaultPlan(raise_at(rank=0, step=0, attempt=1))
    plan.reach(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InjectedFault, match="planned for rank 0, step 0"):
        plan.reach(0)


def test_threads_of_the_kernel_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no environment, now or later: a look at all processes would take seconds."""
    flags = {"2": 0x208040, "3": 0x400040}
    for pid, flag in flags.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "environ").write_bytes(b"")
        (tmp_path / pid / "stat").write_text(f"{pid} (some (name)) S 0 0 0 0 -1 {flag} 0 0")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / "3" / "environ").write_bytes(b"A=1\0MARK=tag\0")

    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setattr(processes.time, "sleep", wait)
    assert not processes.was_started_with(2, "MARK", "tag")
    assert waits == []
    assert processes.was_started_with(3, "MARK", "tag"), "a program that is just starting"
    assert len(waits) == 1
