"""The arithmetic of ``bench comm``: factors, fits, sizes, groups, slow links."""

from __future__ import annotations

import json
import random

import pytest
from bench_cases import made_up
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.collectives import COLLECTIVES, bus_bandwidth
from paceline.bench.comm_request import CommRequest, groups_of, parse_size, read_request
from paceline.bench.comm_result import CommResult, Pair, make_cell, slow_links, spread
from paceline.bench.latency_fit import fit, predict
from paceline.bench.pairs import summarised
from paceline.bench.timing import make_plan
from paceline.errors import ConfigError
from paceline.network.round_robin import round_robin
from paceline.options import Reduction

GOOD = {
    "collectives": "all_reduce",
    "sizes": "1K",
    "groups": "",
    "dtype": "float32",
    "device": "cpu",
    "seconds": 0.1,
    "pairs": True,
}


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bus_bandwidth_counts_as_nccl_tests_do(name: str, factor: float) -> None:
    assert bus_bandwidth(name, 4, 1000, 0.5) == pytest.approx(2000 * factor)


@given(
    latency=st.floats(1e-6, 1.0),
    bandwidth=st.floats(1e3, 1e11),
    exponents=st.sets(st.integers(3, 30), min_size=2),
)
def test_a_wire_that_is_a_line_is_found(
    latency: float, bandwidth: float, exponents: set[int]
) -> None:
    points = [(2**e, latency + 2**e / bandwidth) for e in exponents]
    line = fit(points)
    if line is None:  # so little is sent that it is lost in the latency's last digits
        assert max(2**e for e in exponents) / bandwidth < 1e-6 * latency
        return
    assert line.off < 1e-6
    assert line.seconds(points[0][0]) == pytest.approx(points[0][1], rel=1e-6)


def test_fit_of_noisy_times() -> None:
    noise = random.Random(0)
    points = [(2**e, (0.005 + 2**e / 12.5e6) * noise.uniform(0.95, 1.05)) for e in range(10, 27, 2)]
    line = fit(points)
    assert line is not None
    assert line.latency == pytest.approx(0.005, rel=0.1)
    assert line.bandwidth == pytest.approx(12.5e6, rel=0.1)
    assert 0 < line.off < 0.15


def test_no_line() -> None:
    assert fit([]) is None
    assert fit([(1024, 0.1)]) is None
    assert fit([(1024, 0.1), (1024, 0.2)]) is None
    assert fit([(1024, 0.2), (1 << 20, 0.1)]) is None, "more bytes were faster"


def test_a_line_never_starts_below_nothing() -> None:
    line = fit([(1000, 0.001), (2000, 0.004), (4000, 0.016)])
    assert line is not None
    assert line.latency == 0
    assert line.off > 0.1, "and it says that it does not fit"


def test_what_a_larger_size_will_take() -> None:
    assert predict([], 4096) is None
    assert predict([(1024, 0.01)], 4096) == pytest.approx(0.04), "nothing is known of the latency"
    assert predict([(1024, 0.010), (2048, 0.011)], 4096) == pytest.approx(0.013)
    assert predict([(1024, 0.02), (2048, 0.01)], 4096) == pytest.approx(0.01), "noise"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1K", 1024), ("64k", 65536), ("1.5M", 1572864), ("2GiB", 2**31), (" 4096 B", 4096)],
)
def test_sizes_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1K", "0", "0.3", "1T", "one", "1 2", "1e3"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size"):
        parse_size(text)


def test_the_slowest_rank_of_every_sample_counts() -> None:
    cell = make_cell("all", "all_gather", 800, 1, {"all": [[1.0, 2.0, 3.0], [3.0, 1.0, 4.0]]})
    assert (cell.median, cell.ranks, cell.samples) == (3.0, 2, 3)
    assert cell.p10 < cell.median < cell.p90
    assert cell.algorithm_bandwidth == pytest.approx(800 / 3)
    assert cell.bus_bandwidth == pytest.approx(400 / 3)


def test_of_several_groups_the_slowest_counts() -> None:
    times = {"left": [[1.0], [1.0]], "right": [[2.0], [1.5], [1.0]]}
    cell = make_cell("within", "all_reduce", 300, 1, times)
    assert (cell.median, cell.ranks) == (2.0, 3)
    assert cell.by_group == {"left": 1.0, "right": 2.0}
    assert cell.bus_bandwidth == pytest.approx(2 * 2 / 3 * 150)


def test_spread_of_one_and_of_many() -> None:
    assert spread([7.0]) == (7.0, 7.0, 7.0)
    low, middle, high = spread([float(n) for n in range(101)])
    assert (low, middle, high) == pytest.approx((10, 50, 90))


def test_plan_keeps_to_its_time() -> None:
    short, middling, long = make_plan(1e-5, 0.3), make_plan(0.01, 0.3), make_plan(2.0, 0.3)
    assert (short.calls, short.samples) == (20, 100)
    assert middling.calls > 1
    assert middling.calls * middling.samples * 0.01 <= 0.3
    assert (long.calls, long.samples) == (1, 1)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_meets_once_and_nobody_has_two_partners(count: int) -> None:
    plan = round_robin(range(count))
    met = [pair for at_once in plan for pair in at_once]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for at_once in plan:
        busy = [rank for pair in at_once for rank in pair]
        assert len(busy) == len(set(busy))


def test_pairs_of_one_machine_together() -> None:
    links = [((0, 1), (1e-5, 9.0, 5.0)), ((0, 2), (3e-5, 7.0, 8.0)), ((1, 2), (2e-5, 2.0, 8.0))]
    inside = summarised("left", links)
    assert (inside.latency, inside.bandwidth, inside.pairs) == (2e-5, 5.0, 3)
    assert (inside.slowest, inside.slowest_bandwidth) == ((1, 2), 2.0)


def test_slow_links_are_named() -> None:
    def pair(a: str, b: str, rate: float) -> Pair:
        return Pair(a, b, 1e-4, rate, rate * 1.1)

    assert slow_links([pair("a", "b", 1.0)]) == [], "nothing to compare it with"
    alike = [pair("a", "b", 1.0), pair("a", "c", 0.9), pair("b", "c", 0.8)]
    assert slow_links(alike) == []
    one_machine = [pair("a", "b", 1.0), pair("a", "c", 0.1), pair("b", "c", 0.1)]
    assert slow_links(one_machine) == ["all links of c are slow"]
    one_link = [pair("a", "b", 1.0), pair("a", "c", 0.1), pair("b", "c", 0.9)]
    assert slow_links(one_link) == ["the link a ↔ c is slow"]
    one_way = [pair("a", "b", 1.0), Pair("a", "c", 1e-4, 1.0, 0.1), pair("b", "c", 0.9)]
    assert slow_links(one_way) == ["the link a ↔ c is slow"]


def test_groups() -> None:
    assert groups_of([[0, 1, 2]]) == {"all": [[0, 1, 2]]}
    assert groups_of([[0], [1]]) == {"all": [[0, 1]]}
    uneven = [[0, 1], [2], [3, 4]]
    assert groups_of(uneven) == {
        "all": [[0, 1, 2, 3, 4]],
        "within": [[0, 1], [3, 4]],
        "across": [[0, 2, 3]],
    }
    assert list(groups_of(uneven, ["across"])) == ["across"]
    assert groups_of([[0], [1]], ["across"]) == {"across": [[0, 1]]}
    assert groups_of([[0, 1]], ["within"]) == {"within": [[0, 1]]}


def test_request_goes_to_the_ranks_and_back() -> None:
    request = read_request(**{**GOOD, "sizes": "1M, 1K,1M", "groups": "across,all"})
    assert request.sizes == (1024, 1048576)
    assert request.groups == ("all", "across")
    assert CommRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"collectives": "allreduce"}, "barrier; did you mean 'all_reduce'?"),
        ({"collectives": " , "}, "names none: give some of all_reduce"),
        ({"sizes": ""}, "--sizes '' names none: give some, like"),
        ({"sizes": "1K,many"}, "--sizes: 'many' is not a size"),
        ({"groups": "nodes"}, "--group nodes: must be one of all, within, across"),
        ({"dtype": "fp32"}, "--dtype fp32: must be one of float32"),
        ({"device": "tpu"}, "--device tpu: must be one of auto, cpu, cuda"),
        ({"seconds": 0.0}, "--seconds 0: must be a number of seconds above 0"),
        ({"seconds": float("nan")}, "--seconds nan: must be"),
    ],
)
def test_mistakes_are_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_request(**{**GOOD, **changed})
    (problem,) = caught.value.problems
    assert said in problem


def test_result_goes_to_json_and_back() -> None:
    result = made_up()
    data = json.loads(json.dumps(result.to_dict()))
    assert CommResult.from_dict(data) == result
    [line] = [f for f in data["fits"] if (f["group"], f["collective"]) == ("within", "all_reduce")]
    assert line["latency"] == pytest.approx(1e-4)
    assert line["bandwidth"] == pytest.approx(1e9)
    assert data["links"] == {"within": "10 Gbit/s 0.05 ms", "across": "100 Mbit/s 5 ms"}
    Reduction(links=data["links"])
    assert set(COLLECTIVES) >= {cell["collective"] for cell in data["cells"]}
