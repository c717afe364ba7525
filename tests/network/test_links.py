"""Links are read as they are written, and the cheaper way to sum is chosen by arithmetic."""

from __future__ import annotations

import pytest

from paceline.errors import TrainingError
from paceline.network.links import (
    PIECE_BYTES,
    Link,
    Links,
    choose,
    flat_seconds,
    hierarchical_seconds,
)
from paceline.network.topology import Topology
from paceline.options.reduction import Reduction

TWO_BY_TWO = Topology(((0, 1), (2, 3)))
FREE = Link(0.0, 1e15)
SLOW = Link.parse("100 Mbit/s")


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [
        ("100 Mbit/s 5 ms", 0.005, 12.5e6),
        ("100Mbit/s, 5ms", 0.005, 12.5e6),
        ("10 Gbit/s", 0.0, 1.25e9),
        ("1.5 GB/s 20 us", 20e-6, 1.5e9),
        ("2 GiB/s 20 µs", 20e-6, 2 * 2**30),
        ("64 kbit/s 0.5 s", 0.5, 8000),
        ("1e3 mbit/s 1 MS", 0.001, 125e6),
    ],
)
def test_a_link_is_read_as_it_is_written(text: str, latency: float, bandwidth: float) -> None:
    link = Link.parse(text)
    assert link.latency == pytest.approx(latency)
    assert link.bandwidth == pytest.approx(bandwidth)
    again = Link.parse(str(link))
    assert again.bandwidth == pytest.approx(bandwidth, rel=5e-3)
    assert again.latency == pytest.approx(latency, rel=5e-3)


@pytest.mark.parametrize("text", ["", "fast", "5 ms", "100 Mbit", "100 Mbit/s 5", "-1 Mbit/s", 7])
def test_what_is_no_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(TrainingError, match="100 Mbit/s 5 ms"):
        Link.parse(text)


def test_a_link_that_carries_nothing_is_refused() -> None:
    with pytest.raises(TrainingError, match="above 0"):
        Link.parse("0 Mbit/s")


def test_ranks_by_node() -> None:
    found = Topology.of([0, 2, 3, 5, 6], node_of=[0, 0, 0, 1, 1, 1, 2])
    assert found.nodes == ((0, 2), (3, 5), (6,))
    assert found.lanes == 1
    assert found.lane(0) == (0, 3, 6)
    assert found.node_of(5) == (3, 5)
    assert found.has_two_levels
    assert str(found) == "nodes with 2, 2 and 1 ranks"
    assert str(TWO_BY_TWO) == "2 nodes with 2 ranks each"


@pytest.mark.parametrize("nodes", [((0, 1, 2, 3),), ((0,), (1,), (2,))])
def test_one_node_or_one_rank_a_node_has_one_level(nodes: tuple[tuple[int, ...], ...]) -> None:
    topology = Topology(nodes)
    assert not topology.has_two_levels
    assert not choose(topology, Links(FREE, SLOW), 10**8).hierarchical


def test_the_ring_leaves_a_node_as_often_as_the_order_of_ranks_says() -> None:
    assert TWO_BY_TWO.ways_out() == [1, 1]
    assert Topology(((0, 2), (1, 3))).ways_out() == [2, 2]
    assert Topology(((0, 1, 2), (3,))).ways_out() == [1, 1]


def test_over_a_slow_link_time_is_what_crosses_it() -> None:
    """Two nodes with two ranks: 2·3/4 of the bytes in one ring, 2·1/2 in two levels."""
    links, size = Links(FREE, SLOW), 25 * 10**6
    assert flat_seconds(TWO_BY_TWO, links, size) == pytest.approx(3.0)
    assert hierarchical_seconds(TWO_BY_TWO, links, size) == pytest.approx(2.0)
    chosen = choose(TWO_BY_TWO, links, size)
    assert chosen.hierarchical
    assert chosen.flat_seconds / chosen.hierarchical_seconds == pytest.approx(1.5)


def test_ranks_in_turns_send_everything_over_the_link_twice() -> None:
    links, size = Links(FREE, SLOW), 25 * 10**6
    assert flat_seconds(Topology(((0, 2), (1, 3))), links, size) == pytest.approx(6.0)


def test_with_equal_links_the_way_within_costs_more_than_it_saves() -> None:
    """All ranks one hop apart: three phases send as much as the ring, and a node shares a link."""
    same = Link.parse("1 Gbit/s")
    size = PIECE_BYTES  # one piece: nothing overlaps
    flat = flat_seconds(TWO_BY_TWO, Links(same, same), size)
    layered = hierarchical_seconds(TWO_BY_TWO, Links(same, same), size)
    assert flat == pytest.approx(1.5 * size / same.bandwidth)
    assert layered == pytest.approx(2.0 * size / same.bandwidth)
    assert not choose(TWO_BY_TWO, Links(same, same), size).hierarchical


def test_latency_alone_favours_fewer_crossings() -> None:
    links = Links(Link(1e-5, 1e15), Link(5e-3, 1e15))
    # 2 of 4 hops cross, 2·3/4 times round: 15 ms; along a lane of two: there and back, 10 ms.
    assert flat_seconds(TWO_BY_TWO, links, 4) == pytest.approx(15e-3, rel=0.01)
    assert hierarchical_seconds(TWO_BY_TWO, links, 4) == pytest.approx(10e-3, rel=0.01)


def test_an_uneven_node_pays_for_the_ranks_that_have_no_lane() -> None:
    """Three ranks beside one: everything goes to one rank of the three, from both others."""
    links = Links(Link(0.0, 1e9), FREE)
    size = PIECE_BYTES
    seconds = hierarchical_seconds(Topology(((0, 1, 2), (3,))), links, size)
    assert seconds == pytest.approx(2 * 2 * size / 1e9)


def test_options_are_checked() -> None:
    described = Reduction(links={"within": "10 Gbit/s", "across": "100 Mbit/s 5 ms"}).described
    assert described == Links(Link(0.0, 1.25e9), Link(0.005, 12.5e6))
    assert Reduction().static_mib is None
    assert Reduction(bucket_mib=4).static_mib == 4
    assert Reduction(overlap=False).static_mib == float("inf")
    assert Reduction(bucket_mib="tuned").tuned
    assert Reduction.of(None) == Reduction()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hierarchy": "sometimes"}, "hierarchy='sometimes' must be one of auto, always, never"),
        ({"bucket_mib": 0}, "bucket_mib=0 must be a number of MiB above 0"),
        ({"bucket_mib": "best"}, "bucket_mib='best' must be"),
        ({"bucket_mib": True}, "bucket_mib=True must be"),
        ({"bucket_mib": 4, "overlap": False}, "Leave one of them out"),
        ({"overlap": 1}, "overlap=1 must be True or False"),
        ({"links": {"within": "1 Gbit/s"}}, "must tell of both kinds"),
        ({"links": {"within": "1 Gbit/s", "across": "slow"}}, "'slow' does not describe a link"),
    ],
)
def test_wrong_options_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        Reduction(**wrong)
    with pytest.raises(TrainingError, match=r"must be a paceline\.Reduction"):
        Reduction.of("always")
