"""Mixtures: exact proportions, every sample once before any comes again, at any position."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.uneven_shards import every, read, shards_of
from paceline.data import loader, mixture, shards
from paceline.errors import DataError

OFFSET = 10_000


def numbers(source: int, count: int) -> list[int]:
    return [source * OFFSET + number for number in range(count)]


@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=4),
    epoch=st.integers(50, 700),
    seed=st.integers(0, 9),
    killed=st.integers(0, 6),
)
def test_proportions_are_exact_and_sources_go_through_their_own_epochs(
    parts: list[tuple[int, int]], epoch: int, seed: int, killed: int
) -> None:
    sources = [numbers(at, count) for at, (count, _) in enumerate(parts)]
    data = mixture(sources, [weight for _, weight in parts], samples_per_epoch=epoch)
    options: dict[str, Any] = dict(global_batch=64, seed=seed, rank=0, size=1)
    whole = loader(data, **options)
    seen = [*every([whole]), *every([whole]), *every([whole])]
    assert len(seen) == 3 * epoch
    drawn = Counter(number // OFFSET for number in seen)
    total = sum(weight for _, weight in parts)
    window = data.paceline_order(seed, True).window  # type: ignore[attr-defined]
    for at, (_, weight) in enumerate(parts):
        assert abs(drawn[at] - 3 * epoch * weight / total) <= 1 + (3 * epoch) % window
        upto = 3 * epoch - (3 * epoch) % window
        count = sum(number // OFFSET == at for number in seen[:upto])
        assert abs(count - upto * weight / total) < 1
    for source in sources:
        own = [number for number in seen if number in set(source)]
        for start in range(0, len(own), len(source)):
            stretch = own[start : start + len(source)]
            assert len(set(stretch)) == len(stretch)
    pair = [loader(data, **{**options, "rank": rank, "size": 2}) for rank in range(2)]
    start = every(pair, killed) if killed else []
    triple = [
        loader(data, **{**options, "rank": rank, "size": 3, "global_batch": 10})
        for rank in range(3)
    ]
    for one in triple:
        one.load_state_dict(pair[0].state_dict())
    rest = every(triple)
    assert [*start, *rest] == seen[: len(start) + len(rest)]


def test_mixtures_of_shards_and_of_mixtures() -> None:
    files = shards(shards_of([30, 5, 12]), read=read)
    inner = mixture({"a": files, "b": numbers(1, 20)}, {"a": 0.7, "b": 0.3})
    outer = mixture([inner, numbers(2, 33)])
    assert len(outer) == 100
    assert inner.weights == {"a": Fraction(7, 10), "b": Fraction(3, 10)}
    seen = every([loader(outer, global_batch=16, rank=0, size=1)])
    assert len(seen) == 100
    same = every([loader(outer, global_batch=7, rank=rank, size=2) for rank in range(2)])
    assert same == seen


def test_a_config_can_describe_the_datasets() -> None:
    described = {"target": "data.uneven_shards:Numbers", "args": {"count": 5}}
    data = mixture({"a": described, "b": [7]}, {"a": 5, "b": 1})
    seen = every([loader(data, global_batch=6, rank=0, size=1)])
    assert sorted(seen) == [0, 1, 2, 3, 4, 7]
    for wrong, says in (
        ({"args": {}}, "has no 'target'"),
        ({"target": "a:b", "weight": 1}, "has 'weight'"),
        ({"target": "data.uneven_shards:nothing"}, "cannot import"),
    ):
        with pytest.raises(DataError, match=says):
            mixture({"a": wrong})


def test_what_is_wrong_is_said() -> None:
    for datasets, weights, says in (
        ([], None, "no dataset was given"),
        ([iter([1])], None, "which has no length or no items"),
        ([[]], None, "dataset '0' is empty"),
        ({"a": [1], "b": [1]}, {"a": 1}, "weights for a, but the datasets are a, b"),
        ([[1]], [0], "the weight of '0' is 0, but must be a number above 0"),
        ([[1], [1]], [1, 1e-9], "more than a million times"),
    ):
        with pytest.raises(DataError, match=says):
            mixture(datasets, weights)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="samples_per_epoch=0"):
        mixture([[1]], samples_per_epoch=0)
    state = loader(mixture([[1], [2]], [1, 2]), global_batch=1).state_dict()
    with pytest.raises(DataError, match="saved with mixture="):
        loader(mixture([[1], [2]], [2, 1]), global_batch=1).load_state_dict(state)
