from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.retention import Entry, Keep, best_step, to_delete
from paceline.errors import ConfigError


def entries(*steps: int, **metrics: list[float]) -> list[Entry]:
    return [
        Entry(step, {name: values[i] for name, values in metrics.items()})
        for i, step in enumerate(steps)
    ]


def test_the_last_few() -> None:
    assert to_delete(entries(10, 20, 30, 40), Keep(last=2)) == [10, 20]
    assert to_delete(entries(10), Keep(last=2)) == []
    assert to_delete([], Keep()) == []


def test_order_is_by_step_however_they_are_listed() -> None:
    assert to_delete(entries(40, 10, 30, 20), Keep(last=1)) == [10, 20, 30]


def test_the_best_few_stay_beside_the_last() -> None:
    listed = entries(10, 20, 30, 40, loss=[0.5, 0.1, 0.2, 0.9])
    assert to_delete(listed, Keep(last=1, best=1, metric="loss")) == [10, 30]
    assert to_delete(listed, Keep(last=1, best=2, metric="loss")) == [10]
    assert to_delete(listed, Keep(last=1, best=2, metric="loss", mode="max")) == [20, 30]


def test_of_equals_the_earlier_is_the_best() -> None:
    listed = entries(10, 20, 30, acc=[0.5, 0.5, 0.5])
    assert to_delete(listed, Keep(last=1, best=1, metric="acc", mode="max")) == [20]
    assert best_step(listed, Keep(metric="acc", mode="max")) == 10


def test_no_metric_is_never_the_best() -> None:
    listed = [Entry(10, {"loss": math.nan}), Entry(20), Entry(30, {"loss": 9.0}), Entry(40)]
    keep = Keep(last=1, best=2, metric="loss")
    assert to_delete(listed, keep) == [10, 20]
    assert best_step(listed, keep) == 30
    assert best_step(listed[:2], keep) is None


def test_every_so_many_steps() -> None:
    assert to_delete(entries(50, 100, 150, 200, 250), Keep(last=1, every=100)) == [50, 150]


def test_a_later_one_that_was_stepped_over_does_not_count() -> None:
    # 30 could not be read, so the run went on from 20 and has just saved 25.
    assert to_delete(entries(10, 20, 25, 30), Keep(last=2), newest=25) == [10]


def test_one_known_to_be_damaged_neither_counts_nor_goes() -> None:
    listed = [Entry(10), Entry(20), Entry(30, good=False), Entry(40)]
    assert to_delete(listed, Keep(last=2)) == [10]


@given(
    st.lists(st.builds(Entry, st.integers(0, 60), st.just({"m": 1.0}), st.booleans()), max_size=12),
    st.builds(
        Keep,
        last=st.integers(1, 4),
        best=st.integers(0, 3),
        metric=st.just("m"),
        every=st.none() | st.integers(1, 20),
    ),
)
def test_what_is_promised_stays(listed: list[Entry], keep: Keep) -> None:
    listed = list({entry.step: entry for entry in listed}.values())
    deleted = to_delete(listed, keep)
    good = sorted(entry.step for entry in listed if entry.good)
    assert set(deleted) <= set(good)
    assert deleted == sorted(deleted)
    assert not set(deleted) & set(good[-keep.last :])
    assert len(good) - len(deleted) >= min(len(good), keep.last)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"last": 0}, "at least 1 has to stay"),
        ({"best": -1}, "0 .none. or more"),
        ({"best": 1}, "by which metric"),
        ({"mode": "least"}, "'min' or 'max'"),
        ({"every": 0}, "1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Keep(**wrong)  # type: ignore[arg-type]
