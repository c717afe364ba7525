"""The layout a run goes on with when ranks were lost or came: as a function, no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.layout.fitting import fit

CASES = [
    # asked for, ranks, gone on with
    ("dp=4", 4, "dp=4"),
    ("dp=4", 3, "dp=3"),
    ("dp=4", 1, "dp=1"),
    ("dp=4", 6, "dp=4"),  # never more than asked for
    ("auto", 6, "dp=6"),  # unless nothing was
    ("", 3, "dp=3"),
    ("tp=2", 7, "dp=3,tp=2"),
    ("dp=2,tp=2", 3, "dp=1,tp=2"),
    ("dp=2,tp=2,pp=2", 7, "dp=1,tp=2,pp=2"),
    ("dp=4,zero=3", 3, "dp=3,zero=3"),
    ("dp=4,zero=2", 1, "dp=1,zero=2"),
    ("dp=8,zero=3,replicas=4", 6, "dp=6,zero=3,replicas=3"),
    ("dp=8,zero=3,replicas=4", 7, "dp=7,zero=3"),
    ("dp=6,zero=3,replicas=2", 4, "dp=4,zero=3"),  # two copies would need three ranks each
    ("zero=3,replicas=2", 4, "dp=4,zero=3,replicas=2"),
    ("zero=3,replicas=2", 3, "dp=3,zero=3"),
    ("dp=8,ep=4", 7, "dp=4,ep=4"),
    ("dp=4,cp=2,ep=4", 7, "dp=2,cp=2,ep=4"),
]


@pytest.mark.parametrize(("asked", "ranks", "found"), CASES)
def test_largest_layout_that_the_ranks_allow(asked: str, ranks: int, found: str) -> None:
    assert str(fit(asked, ranks)) == str(Layout.parse(found))
    if "dp=" in asked:
        assert fit(Layout.parse(asked), ranks) == Layout.parse(found)


@pytest.mark.parametrize(
    ("asked", "ranks"), [("tp=2", 1), ("dp=2,tp=2,pp=2", 3), ("dp=8,ep=4", 3), ("dp=2", 0)]
)
def test_nothing_fits(asked: str, ranks: int) -> None:
    assert fit(asked, ranks) is None


@pytest.mark.parametrize("text", ["dp=3,replicas=2", "dpp=2", "dp=0"])
def test_layout_that_is_wrong_at_any_size_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        fit(text, 8)


@given(
    st.builds(
        lambda shards, replicas, zero, tp, pp: Layout(
            dp=shards * replicas, zero=zero, replicas=replicas if zero else 1, tp=tp, pp=pp
        ),
        *(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)),
        *(st.integers(1, 3), st.integers(1, 3)),
    ),
    st.integers(0, 64),
)
def test_what_fits_is_like_what_was_asked_for(layout: Layout, ranks: int) -> None:
    found = fit(layout, ranks)
    if found is None:
        assert ranks < layout.tp * layout.pp
        return
    assert (found.tp, found.pp, found.zero) == (layout.tp, layout.pp, layout.zero)
    assert found.world_size <= min(ranks, layout.world_size)
    assert ranks < layout.world_size or found == layout
    assert found.world_size + found.tp * found.pp > min(ranks, layout.world_size)
    assert found.dp < layout.shards or found.shards >= layout.shards
