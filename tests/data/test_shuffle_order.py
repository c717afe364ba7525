"""The global order: a permutation, well mixed, the same everywhere, at no cost."""

import itertools
import math
import tracemalloc
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Order
from paceline.errors import DataError


def epoch_of(order: Order, epoch: int) -> list[int]:
    return order.indices(epoch, 0, order.n).tolist()


def z_score(counts: list[float], expected: float) -> float:
    """How far chi-square is from its mean, in its own standard deviations."""
    freedom = len(counts) - 1
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(
    n=st.one_of(st.integers(1, 40), st.integers(1000, 3000)),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10**6),
)
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(Order(n, seed), epoch)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), seed=st.integers(0, 2**64), data=st.data())
def test_any_stretch_can_be_drawn_on_its_own(n: int, seed: int, data: st.DataObject) -> None:
    order = Order(n, seed)
    start = data.draw(st.integers(0, n - 1))
    stop = min(n, start + 50)
    stretch = order.indices(3, start, stop).tolist()
    one_by_one = [int(order.indices(3, at, at + 1)) for at in range(start, stop)]
    assert stretch == one_by_one
    assert len(set(stretch)) == len(stretch)
    assert all(0 <= index < n for index in stretch)


def test_the_numbers_never_change() -> None:
    """A run must resume at the next sample on another machine and in a later version."""
    assert epoch_of(Order(10, seed=0), 0) == GOLDEN["ten"]
    assert epoch_of(Order(10, seed=0), 1) == GOLDEN["ten, epoch 1"]
    assert epoch_of(Order(10, seed=-1), 0) == GOLDEN["ten, seed -1"]
    assert Order(5000, seed=7).indices(2, 0, 6).tolist() == GOLDEN["5000"]
    assert Order(10**9, seed=7).indices(2, 10**9 - 4, 10**9).tolist() == GOLDEN["a billion"]
    assert Order(2**62, seed=2**80).indices(0, 0, 2).tolist() == GOLDEN["2^62"]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_tiny_sets_take_every_permutation_equally_often(n: int) -> None:
    permutations = list(itertools.permutations(range(n)))
    draws = 200 * len(permutations)
    seen = Counter(tuple(epoch_of(Order(n, at // 10), at % 10)) for at in range(draws))
    assert abs(z_score([seen[p] for p in permutations], 200)) < 4


@pytest.mark.parametrize("n", [5, 10, 100, 1000, 1025])
def test_an_element_lands_anywhere_equally_often(n: int) -> None:
    """At the first position, and as the distance between two neighbours."""
    draws = max(1500, 2 * n)
    first, distance = [0] * n, [0] * n
    for at in range(draws):
        a, b = Order(n, at // 10).indices(at % 10, 0, 2).tolist()
        first[a] += 1
        distance[(b - a) % n] += 1
    assert abs(z_score(first, draws / n)) < 4
    assert distance[0] == 0
    assert abs(z_score(distance[1:], draws / (n - 1))) < 4


@pytest.mark.parametrize("n", [1000, 1500, 20_011])
def test_an_epoch_is_unlike_its_input_its_neighbour_and_the_next_epoch(n: int) -> None:
    order = Order(n, seed=3)
    this, following = (order.indices(epoch, 0, n).double() for epoch in (0, 1))
    other_seed = Order(n, seed=4).indices(0, 0, n).double()
    pairs = {
        "the counting order": (this, torch.arange(n).double()),
        "the next epoch": (this, following),
        "another seed": (this, other_seed),
        "its own neighbour": (this[1:], this[:-1]),
    }
    for a, b in pairs.values():
        # Correlation of independent permutations has deviation 1/sqrt(n); four of them is rare.
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / math.sqrt(n)
    assert int((this == following).sum()) < 10  # one on average


def test_unshuffled_is_counting() -> None:
    assert Order(7, shuffle=False).indices(9, 2, 6).tolist() == [2, 3, 4, 5]


def test_a_billion_samples_take_no_memory() -> None:
    Order(10, seed=1).indices(0, 0, 5)  # what is imported on first use is not counted
    tracemalloc.start()
    indices = Order(10**9, seed=1).indices(12, 123_456_789, 123_457_789)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert indices.shape == (1000,)
    assert peak < 1_000_000


def test_drawing_leaves_the_random_generators_alone() -> None:
    before = torch.get_rng_state()
    Order(5000, 1).indices(0, 0, 100)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Order(0), "Order: n=0 must be from 1 to 2^62: an order needs a sample."),
        (lambda: Order(-3), "Order: n=-3 must be from 1 to 2^62: an order needs a sample."),
        (
            lambda: Order(2**62 + 1),
            "Order: n=4611686018427387905 must be from 1 to 2^62: an order needs a sample.",
        ),
        (
            lambda: Order(10.0),
            "Order: n=10.0 must be a whole number: how many samples there are.",
        ),
        (
            lambda: Order(True),
            "Order: n=True must be a whole number: how many samples there are.",
        ),
        (lambda: Order(10, "7"), "Order: seed='7' must be a whole number, like 0."),
        (
            lambda: Order(10).indices(0, 5, 11),
            "Order: positions 5 to 11 must lie within 0 to n=10, in order.",
        ),
        (
            lambda: Order(10).indices(0, 5, 4),
            "Order: positions 5 to 4 must lie within 0 to n=10, in order.",
        ),
        (
            lambda: Order(10).indices(-1, 0, 1),
            "Order: epoch=-1 must be a whole number, 0 or more.",
        ),
    ],
)
def test_wrong_calls(call, message) -> None:
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == message


GOLDEN = {
    "ten": [1, 2, 6, 9, 3, 8, 4, 7, 0, 5],
    "ten, epoch 1": [2, 6, 3, 4, 5, 1, 7, 9, 8, 0],
    "ten, seed -1": [2, 7, 0, 3, 6, 4, 9, 5, 1, 8],
    "5000": [1450, 1919, 4757, 3625, 4990, 3621],
    "a billion": [125505968, 567244082, 681238098, 991055813],
    "2^62": [1105990287957554241, 2883076347239383980],
}
