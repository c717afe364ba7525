"""The size of buckets follows from when gradients are there and from the wire."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.network.buckets import (
    CANDIDATES,
    DEFAULT_MIB,
    MIB,
    ONE_BUCKET,
    Gradient,
    evenly,
    exchange_seconds,
    lay_out,
    tune,
)
from paceline.network.links import Link

LAYERS = [4 * MIB] * 32
"""128 MiB in 32 equal gradients."""


def test_buckets_are_laid_out_as_ddp_does() -> None:
    """Against torch's own (private, as of 2.13), which DDP calls with the parameters in order."""
    sizes = [3, 900, 17, 200_000, 5, 600_000, 1, 1, 300_000, 262_144, 70, 262_143, 2]
    tensors = [torch.empty(size) for size in sizes]
    for mib in (0.5, 1.0, 2.0, DEFAULT_MIB, 50.0):
        limits = [MIB, 25 * MIB] if mib == DEFAULT_MIB else [int(mib * MIB)]
        by_torch, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        in_backward = [4 * size for size in reversed(sizes)]
        last = len(sizes) - 1
        ours = [sorted(last - i for i in bucket) for bucket in lay_out(in_backward, mib)]
        assert ours == [sorted(bucket) for bucket in reversed(by_torch)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5 * MIB), max_size=40), st.sampled_from(CANDIDATES))
def test_every_gradient_is_in_one_bucket_in_the_order_of_the_backward(
    sizes: list[int], mib: float
) -> None:
    assert [i for bucket in lay_out(sizes, mib) for i in bucket] == list(range(len(sizes)))


def test_gradients_come_in_proportion_to_their_size() -> None:
    assert evenly([1, 3], 2.0) == [Gradient(1, 0.5), Gradient(3, 2.0)]
    assert evenly([], 1.0) == []


def test_a_wire_that_costs_nothing_leaves_the_backward() -> None:
    free = Link(0.0, 1e18)
    assert exchange_seconds(evenly(LAYERS, 0.5), free, 4) == pytest.approx(0.5)


def test_one_bucket_waits_for_the_backward_and_then_for_the_wire() -> None:
    link = Link(0.01, 128 * MIB)
    assert exchange_seconds(evenly(LAYERS, 0.5), link, ONE_BUCKET) == pytest.approx(0.5 + 1.01)


def test_the_wire_is_busy_from_the_first_bucket_on_where_it_is_the_slower_one() -> None:
    link = Link(0.0, 64 * MIB)  # 2 s for all, 0.5 s for the backward
    # The first of 32 layers is there after 1/32 of the backward.
    assert exchange_seconds(evenly(LAYERS, 0.5), link, 4) == pytest.approx(0.5 / 32 + 2.0)


def test_small_buckets_where_the_backward_is_slow_and_messages_are_cheap() -> None:
    tuned = tune(evenly(LAYERS, 1.0), Link(1e-5, 130 * MIB))
    assert tuned.bucket_mib <= 4
    assert tuned.seconds[tuned.bucket_mib] < tuned.seconds[25.0]
    assert "buckets from 25 MiB to" in str(tuned)
    assert "% less" in str(tuned)


def test_one_bucket_where_messages_are_dear() -> None:
    """Half a second for each, whatever its size: nothing that overlaps makes up for a second."""
    tuned = tune(evenly(LAYERS, 0.1), Link(0.5, 1e12))
    assert tuned.bucket_mib == ONE_BUCKET
    assert "one for everything" in str(tuned)


def test_between_them_the_best_size_is_neither() -> None:
    tuned = tune(evenly(LAYERS, 1.0), Link(0.05, 128 * MIB))
    assert 4 < tuned.bucket_mib < ONE_BUCKET
    assert tuned.seconds[tuned.bucket_mib] == min(tuned.seconds.values())


def test_what_gains_nothing_stays_as_it_is() -> None:
    tuned = tune(evenly([1000], 0.1), Link(1e-3, 1e9), before_mib=7.0)
    assert tuned.bucket_mib == 7.0
    assert "stay at 7 MiB" in str(tuned)


def test_a_gradient_that_comes_late_holds_its_bucket_up() -> None:
    gradients = [Gradient(4 * MIB, 0.1), Gradient(4 * MIB, 2.0), Gradient(4 * MIB, 0.2)]
    link = Link(0.0, 4 * MIB)  # a second for each
    assert exchange_seconds(gradients, link, 4) == pytest.approx(2.0 + 2)
    assert exchange_seconds(gradients, link, 8) == pytest.approx(2.0 + 2)
    assert exchange_seconds(gradients, link, ONE_BUCKET) == pytest.approx(2.0 + 3)
