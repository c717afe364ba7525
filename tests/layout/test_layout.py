"""Layouts: parsed, printed, checked; no torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LayoutError
from paceline.layout import Layout


def test_prints_what_differs_from_the_default_and_parses_back() -> None:
    assert str(Layout()) == "dp=1"
    assert str(Layout(dp=4, zero=3, tp=2)) == "dp=4,zero=3,tp=2"
    assert Layout.parse(" dp=4 , tp=2 ") == Layout(dp=4, tp=2)
    assert Layout.parse(Layout(dp=3)) == Layout(dp=3)
    assert Layout(dp=4, tp=2, pp=3).world_size == 24


@given(st.integers(1, 64), st.integers(0, 3), st.integers(1, 8), st.integers(1, 8))
def test_round_trip(dp: int, zero: int, tp: int, pp: int) -> None:
    layout = Layout(dp=dp, zero=zero, tp=tp, pp=pp)
    assert Layout.parse(str(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


def test_dp_fills_the_world() -> None:
    assert Layout.parse("auto", world_size=6) == Layout(dp=6)
    assert Layout.parse("tp=2", world_size=8) == Layout(dp=4, tp=2)
    assert Layout.parse("tp=2") == Layout(tp=2)


WRONG = {
    "dpp=2": "layout 'dpp=2': 'dpp' must be one of dp, zero, replicas, tp, pp, cp, ep. Did you mean "
    "'pp'? Write it like \"dp=4,tp=2\".",
    "dp=two": "layout 'dp=two': 'dp=two' must be dp=<whole number>, like dp=2.",
    "dp": "layout 'dp': 'dp' must be dp=<whole number>, like dp=2.",
    "dp=2,dp=3": "layout 'dp=2,dp=3': dp is given twice.",
    "dp=0": "layout: dp=0 must be 1 or more.",
    "dp=-2": "layout: dp=-2 must be 1 or more.",
    "zero=4": "layout: zero=4 must be 0, 1, 2 or 3 (what data-parallel ranks shard: nothing, "
    "optimizer state, + gradients, + parameters).",
    "dp=4,replicas=3": "layout: replicas=3 must divide dp=4: each full copy is kept by dp/replicas "
    "ranks.",
    "dp=4,ep=3": "layout: ep=3 must divide dp × cp = 4: experts are spread over the data- and "
    "context-parallel ranks.",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_layouts(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert str(caught.value) == WRONG[text]


def test_layouts_that_do_not_fit_their_world() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(dp=2, tp=2).check_world(8)
    assert str(caught.value) == (
        "layout 'dp=2,tp=2' needs 4 ranks (dp=2 × tp=2), but the world has 8. Start 4 ranks, or "
        "change the layout."
    )
    with pytest.raises(LayoutError, match="tp × pp × cp = 3 must divide the world size 8"):
        Layout.parse("tp=3", world_size=8)


@pytest.mark.parametrize("text", ["dp=1000000000", "dp=1000,tp=1000,pp=2", "dp=" + "9" * 20])
def test_layouts_beyond_all_machines_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="1000000"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["dp=" + "9" * 5000, "dp=²", "dp=٣"])
def test_degrees_are_plain_whole_numbers(text: str) -> None:
    with pytest.raises(LayoutError, match="must be dp=<whole number>"):
        Layout.parse(text)


def test_old_names_work_for_one_version_and_say_the_new_ones() -> None:
    layout = Layout.parse("dp=2,tp=2")
    with pytest.warns(DeprecationWarning, match=r"Layout\.place is called coordinate now"):
        assert layout.place(3) == layout.coordinate(3)
    with pytest.warns(DeprecationWarning, match="Coordinate"):
        from paceline.layout import Place
    assert isinstance(layout.coordinate(0), Place)
