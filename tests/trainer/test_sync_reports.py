"""The bytes of gradients that a run sends, as it tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sync_cases import fit
from torch import nn

import paceline
from paceline import events
from paceline.events import WireUsed
from paceline.track.scalars import scalars
from paceline.track.summary import Summary


def train(run_dir: str, steps: int, **options: Any) -> None:
    """A matrix of 64 x 32: 8,192 bytes of gradients a step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32, bias=False)
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 64, generator=draw), torch.randn(32, 32, generator=draw)
    )
    fit(model, data, run_dir, steps, save_every=10, **options)


def told(run_dir: Path) -> list[WireUsed]:
    found = events.read(run_dir / events.FILE_NAME)
    return [event for event in found if isinstance(event, WireUsed)]


@pytest.mark.world(2)
def test_bytes_are_told_every_fifty_steps_and_at_the_end(ranks: Any, tmp_path: Path) -> None:
    def job(run_dir: str, steps: int) -> None:
        train(run_dir, steps, compress="int8")

    ranks(job, str(tmp_path), 60)
    ranks(job, str(tmp_path), 70)  # goes on from there
    found = told(tmp_path)
    assert [(event.step, event.steps) for event in found] == [(50, 50), (60, 10), (70, 10)]
    a_step = 2048 + 2 * 4  # a byte an element, and a scale for each 1,024
    for event in found:
        assert event.bytes_sent == [a_step * event.steps] * 2
        assert event.bytes_plain == [8192 * event.steps] * 2
    assert scalars(found[0]) == [("wire/bytes_per_step", a_step)]
    assert any("of gradients a step and rank" in line for line in Summary.read(tmp_path).lines())


@pytest.mark.world(2)
def test_a_run_that_sends_gradients_as_they_are_counts_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks(lambda run_dir: train(run_dir, 5), str(tmp_path))
    assert told(tmp_path) == []


@pytest.mark.world(2)
def test_rounds_of_local_steps_are_counted(ranks: Any, tmp_path: Path) -> None:
    def job(run_dir: str) -> None:
        train(run_dir, 20, local_steps=10)

    ranks(job, str(tmp_path))
    [event] = told(tmp_path)
    assert event.bytes_plain == [20 * 8192] * 2
    # Two meetings, and the numbers of each step: loss, count, samples, norm and verdicts.
    assert all(2 * 8192 <= sent <= 2 * 8192 + 20 * 200 for sent in event.bytes_sent)


@pytest.mark.world(2)
def test_a_report_is_of_one_kind_of_steps(ranks: Any, tmp_path: Path) -> None:
    def job(run_dir: str) -> None:
        compress = paceline.Compression("int8", warmup_steps=12)
        train(run_dir, 40, compress=compress, local_steps=paceline.LocalSteps(every=10, start=20))

    ranks(job, str(tmp_path))
    found = told(tmp_path)
    kinds = [(event.step, event.steps, event.what) for event in found]
    assert kinds == [(12, 12, "warmup"), (20, 8, "gradients"), (40, 20, "distances")]
    assert found[0].bytes_sent == found[0].bytes_plain
    assert found[1].bytes_sent == [8 * (2048 + 2 * 4)] * 2
    line = next(line for line in Summary.read(tmp_path).lines() if "on the wire" in line)
    assert line.endswith(
        "a step and rank, instead of 8.2 kB of gradients (after 20 steps together)"
    )


@pytest.mark.world(2)
def test_steps_before_rounds_that_nobody_counts_are_no_part_of_the_figure(
    ranks: Any, tmp_path: Path
) -> None:
    def job(run_dir: str) -> None:
        train(run_dir, 30, local_steps=paceline.LocalSteps(every=10, start=10))

    ranks(job, str(tmp_path))
    [event] = told(tmp_path)
    assert (event.step, event.steps, event.what) == (30, 20, "distances")
    assert event.bytes_plain == [20 * 8192] * 2
