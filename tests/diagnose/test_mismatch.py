"""Which calls must be alike on all ranks, and finding those that are not without any hang."""

from __future__ import annotations

import pytest

from paceline.diagnose.hangs.mismatch import (
    CallComparison,
    Mismatch,
    digest,
    first_mismatch,
    must_match,
)
from paceline.diagnose.hangs.rank_heartbeat import Call


def call(
    number: int,
    op: str = "all_reduce",
    shape: tuple[int, ...] = (4,),
    dtype: str = "float32",
    *,
    ranks: tuple[int, ...] = (0, 1),
    backend: str = "gloo",
) -> Call:
    return Call(backend, "0", ranks, number, op, (shape,), (dtype,), True)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (call(1), call(1), True),
        (call(1, shape=(2, 2)), call(1, shape=(4,)), True),  # as many elements: all that counts
        (call(1, shape=(4,)), call(1, shape=(8,)), False),
        (call(1), call(1, dtype="int32"), False),
        (call(1), call(1, "broadcast"), False),
        (call(1, "all_to_all", (4,)), call(1, "all_to_all", (6,)), True),  # uneven splits
        (call(1, "gather", (4,)), call(1, "gather", ()), True),
        (call(1, "_allgather_base", (4,)), call(1, "_allgather_base", (6,)), True),
        (call(1, "_reduce_scatter_base"), call(1, "_reduce_scatter_base", (8,)), False),
    ],
)
def test_what_must_match(one: Call, other: Call, alike: bool) -> None:
    assert (must_match(one) == must_match(other)) is alike


def test_the_first_mismatch_is_told() -> None:
    ours = [call(1), call(2), call(3, dtype="int32"), call(4, "barrier")]
    theirs = [call(1), call(2), call(3), call(4)]
    found = first_mismatch({0: ours, 1: theirs})
    assert found is not None
    assert found.number == 3
    assert found.said == {0: "all_reduce [4] int32", 1: "all_reduce [4] float32"}


def test_calls_of_two_backends_are_counted_apart() -> None:
    ours = [call(1), call(1, "broadcast", backend="nccl")]
    assert first_mismatch({0: ours, 1: list(reversed(ours))}) is None


@pytest.mark.parametrize(
    ("said", "blamed"),
    [
        ({0: "a", 1: "a", 2: "b"}, [2]),
        ({0: "a", 1: "b"}, [0, 1]),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, [0, 1, 2, 3]),
    ],
)
def test_the_odd_ones_out_are_blamed(said: dict[int, str], blamed: list[int]) -> None:
    assert Mismatch(("gloo", "0", ()), 1, said).ranks == blamed


def test_digests_are_compared_over_time() -> None:
    """Ranks post at different moments, each what came since the last time."""
    comparison = CallComparison()
    key = call(1).key
    ours = [call(n) for n in range(1, 9)]
    theirs = [call(n, dtype="int32" if n == 6 else "float32") for n in range(1, 9)]
    assert comparison.add({0: digest(ours[:5], {})}) is None
    assert comparison.add({1: digest(theirs[:3], {})}) is None
    assert comparison.add({1: digest(theirs, {key: 3})}) is None
    found = comparison.add({0: digest(ours, {key: 5})})
    assert found is not None
    assert (found.number, found.ranks) == (6, [0, 1])
    assert found.said[1] == "all_reduce [4] int32"


def test_a_group_is_told_once() -> None:
    comparison = CallComparison()
    assert comparison.add({0: digest([call(1)], {}), 1: digest([call(1, "barrier")], {})})
    assert comparison.add({0: digest([call(2)], {}), 1: digest([call(2, "barrier")], {})}) is None
