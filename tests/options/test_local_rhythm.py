"""When fragments meet, and what they are: without a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.options import LocalSteps
from paceline.options.local_steps import fragments_of


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 4}, {4: 0, 8: 0, 12: 0}),
        ({"every": 4, "start": 3}, {7: 0, 11: 0}),
        ({"every": 4, "fragments": 2}, {2: 0, 4: 1, 6: 0, 8: 1, 10: 0, 12: 1}),
        ({"every": 5, "fragments": 3}, {1: 0, 3: 1, 5: 2, 6: 0, 8: 1, 10: 2, 11: 0}),
        ({"every": 1}, dict.fromkeys(range(1, 13), 0)),
    ],
)
def test_rhythm(options: dict[str, int], expected: dict[int, int]) -> None:
    local_steps = LocalSteps(**options)
    found = {step: local_steps.meeting(step) for step in range(13)}
    assert {step: fragment for step, fragment in found.items() if fragment is not None} == expected


@given(every=st.integers(1, 60), start=st.integers(0, 20), data=st.data())
def test_every_fragment_meets_once_in_every_round(
    every: int, start: int, data: st.DataObject
) -> None:
    fragments = data.draw(st.integers(1, every))
    local_steps = LocalSteps(every=every, start=start, fragments=fragments)
    assert all(local_steps.meeting(step) is None for step in range(start + 1))
    for first in (start + 1, start + 1 + every, start + 2):
        met = [local_steps.meeting(step) for step in range(first, first + every)]
        assert sorted(f for f in met if f is not None) == list(range(fragments))


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_fragments_are_everything_once_in_order_and_none_is_much_too_large(
    sizes: list[int], count: int
) -> None:
    cut = fragments_of(sizes, count)
    assert len(cut) == count
    assert [place for part in cut for place in part] == list(range(len(sizes)))
    largest = max(sizes, default=0)
    for part in cut:
        assert sum(sizes[place] for place in part) <= sum(sizes) / count + largest
