"""Random streams: each rank its own, saved and restored to the bit."""

from __future__ import annotations

import io
import itertools
import random

import numpy
import pytest
import torch

from paceline.errors import WorldError
from paceline.world import World, rng_state, seed_everything, set_rng_state


@pytest.fixture(autouse=True)
def _keep_the_streams_of_other_tests():
    before = rng_state()
    yield
    set_rng_state(before)


def draw() -> tuple:
    """Some numbers of every stream; the normal ones have a hidden second value."""
    return (
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.randn(),
    )


def test_the_same_seed_and_rank_give_the_same_streams():
    seed_everything(7, rank=3)
    first = draw()
    seed_everything(7, rank=3)
    assert draw() == first


def test_different_seeds_and_ranks_never_share_a_stream():
    seen = {}
    for seed, rank in itertools.product(range(8), range(8)):
        seed_everything(seed, rank)
        for stream, value in enumerate(draw()):
            key = stream, str(value)
            assert key not in seen, f"{seed, rank} repeats {seen[key]}"
            seen[key] = seed, rank


def test_large_seeds_count_to_the_last_bit():
    draws = []
    for seed in (2**32, 2**32 + 1, 2**63, 2**63 + 1, 2**100):
        seed_everything(seed)
        draws.append(draw())
    assert len({str(values) for values in draws}) == 5


@pytest.mark.parametrize("seed", [-1, 1.5, "0", None, True])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(WorldError, match=r"seed=.* must be a whole number, 0 or more"):
        seed_everything(seed)
    with pytest.raises(WorldError, match=r"rank=.* must be a whole number, 0 or more"):
        seed_everything(0, rank=seed)


def test_state_round_trips_through_a_safe_load():
    seed_everything(3)
    draw()
    numpy.random.randn()  # an odd number of normals: one is kept for the next call
    random.gauss(0, 1)
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draw() for _ in range(3)]
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("state", [{}, {"torch": 1}, None, [1]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(WorldError, match=r"not a state made by rng_state\(\)"):
        set_rng_state(state)


@pytest.mark.world(3)
def test_each_rank_of_a_world_gets_its_own_stream(ranks):
    def job():
        World.current().seed(11)
        return torch.rand(4).tolist()

    first = ranks(job)
    assert len({str(values) for values in first}) == 3
    assert ranks(job) == first
