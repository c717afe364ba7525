"""A sum in two levels is the sum: to rounding that of one ring, to the bit the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline
from paceline.data import share
from paceline.engine.internals import internals_of
from paceline.errors import LayoutError
from paceline.network.links import PIECE_BYTES
from paceline.network.topology import Topology
from paceline.options import Compression
from paceline.sync.compressed.exchange import Exchange
from paceline.sync.hierarchical import Hierarchical, Levels, find_nodes
from paceline.sync.synchronous import SynchronousSGD
from paceline.sync.wire import Wire

# Nodes of equal size, of unequal size, the smaller one first, ranks in turns, three nodes; a single
# node, and a rank a node, which need not go in two levels and can.
TOPOLOGIES = [
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1), (2,)),
    ((0, 1), (2, 3), (4,)),
    ((0, 1, 2),),
    ((0,), (1,), (2,)),
]
# Fewer values than lanes, odd numbers, more than a piece.
SIZES = [0, 1, 2, 3, 17, 1000, PIECE_BYTES // 8 + 3]


def levels_in(world: paceline.World, topologies: list[Topology]) -> Levels:
    return Levels.make(world.rank, topologies, lambda ranks: world.group(ranks).process_group)


def wires(nodes: Any) -> tuple[Wire, Hierarchical]:
    world = paceline.World.current()
    group = world.everyone.process_group
    assert group is not None
    return Wire(group), Hierarchical(group, levels_in(world, [Topology(nodes)]))


def values_of(rank: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + size % 997)
    return torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)


# For half precision: each of up to four additions rounds.
TOLERANCES: dict[torch.dtype, Any] = {
    torch.float64: {"rtol": 1e-13, "atol": 1e-14},
    torch.float16: {"rtol": 5e-3, "atol": 2e-2},
    torch.int32: {},
}


def sums(nodes: Any) -> dict[tuple[torch.dtype, int], tuple[torch.Tensor, ...]]:
    flat, layered = wires(nodes)
    own = {(d, size): values_of(flat.rank, size, d) for d in TOLERANCES for size in SIZES}
    return {
        case: (flat.sum(v.clone()), layered.sum(v.clone()), layered.sum(v.clone()))
        for case, v in own.items()
    }


@pytest.mark.parametrize("nodes", TOPOLOGIES, ids=str)
def test_same_sum_as_one_ring_and_equal_to_the_bit_on_all_ranks(ranks: Any, nodes: Any) -> None:
    results = ranks(sums, nodes, world_size=sum(map(len, nodes)))
    for case, (_, first, _) in results[0].items():
        tolerance = TOLERANCES[case[0]]
        for by_case in results:
            flat, layered, again = by_case[case]
            torch.testing.assert_close(layered, flat, **tolerance, msg=said_of(case))
            assert torch.equal(layered, first), case
            assert torch.equal(again, first), case


def said_of(case: Any) -> Callable[[str], str]:
    """Has the message of a comparison name its case."""
    return lambda text: f"{case}: {text}"


def strided(nodes: Any) -> bool:
    flat, layered = wires(nodes)
    whole = values_of(flat.rank, 24).view(4, 6)
    turned = whole.clone().T
    returned = layered.sum(turned)
    expected = flat.sum(whole.clone()).T
    return returned is turned and torch.allclose(turned, expected, rtol=1e-13)


@pytest.mark.world(4)
def test_values_that_do_not_lie_in_one_piece_are_summed_in_place(ranks: Any) -> None:
    assert all(ranks(strided, TOPOLOGIES[0]))


def counted(nodes: Any, size: int) -> tuple[float, float]:
    _, layered = wires(nodes)
    layered.sum(torch.ones(size))
    return layered.sent, layered.crossed


@pytest.mark.world(4)
def test_bytes_are_counted_by_what_leaves_a_rank_and_a_node(ranks: Any) -> None:
    """Of 4,000 bytes: half to the neighbour, the other half to the other node and back."""
    assert ranks(counted, ((0, 1), (2, 3)), 1000) == [(2000 + 2000 + 2000, 2000.0)] * 4
    uneven = ranks(counted, ((0, 1, 2), (3,)), 1000)
    # The first gives the sum to both others; these give everything to it and cross nothing.
    assert uneven == [(4000 + 8000, 4000), (4000, 0), (4000, 0), (4000, 4000)]


def two_groups(nodes: Any) -> list[float]:
    """Data-parallel groups (0, 2) + (4, 6) and (1, 3) + (5, 7) of a world with tp=2."""
    world = paceline.World.current()
    members = [[0, 2, 4, 6], [1, 3, 5, 7]]
    topologies = [Topology.of(own, nodes) for own in members]
    levels = levels_in(world, topologies)
    groups = [world.group(own) for own in members]
    group = next(own.process_group for own in groups if world.rank in own)
    assert group is not None
    return Hierarchical(group, levels).sum(torch.tensor([float(world.rank)])).tolist()


def test_each_data_parallel_group_has_levels_of_its_own(ranks: Any) -> None:
    found = ranks(two_groups, [0, 0, 0, 0, 1, 1, 1, 1], world_size=8)
    assert found == [[12.0], [16.0]] * 4


def believe(nodes: Any) -> paceline.World:
    """Join the world as if ``nodes`` were machines."""
    rank = int(os.environ["RANK"])
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    os.environ |= {
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(nodes[node].index(rank)),
        "LOCAL_WORLD_SIZE": str(len(nodes[node])),
    }
    return paceline.World.init(device="cpu")


def found_nodes(nodes: Any) -> list[int]:
    return find_nodes(believe(nodes))


def test_nodes_are_those_the_launcher_told_of(ranks: Any) -> None:
    found = ranks(found_nodes, ((0, 1, 2), (3,)), world_size=4, join=False)
    assert found == [[0, 0, 0, 1]] * 4


FORMATS = ["none", "fp16", "bf16", "int8", "sign", "topk:0.2", "randomk:0.2", "powersgd:2+fp16"]


def averages(nodes: Any) -> dict[str, list[torch.Tensor]]:
    flat, layered = wires(nodes)
    return {form: averages_of(form, flat, layered) for form in FORMATS}


def averages_of(form: str, flat: Wire, layered: Wire) -> list[torch.Tensor]:
    """A matrix and a vector through one exchange by a ring and one in two levels."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 30), (7,))]
    names = {id(p): f"p{i}" for i, p in enumerate(parameters)}
    found = []
    for wire in (flat, layered):
        exchange = Exchange(Compression(form, warmup_steps=0), names, wire)
        for step in range(2):  # the second sends what the first left behind
            own = [values_of(10 * wire.rank + step, p.numel()).view_as(p) for p in parameters]
            exchange.step = step
            exchange.average(parameters, own, 0)
            exchange.settle(applied=True)
        found.append(torch.cat([gradient.flatten() for gradient in own]))
    return found


def test_every_format_takes_either_way(ranks: Any) -> None:
    results = ranks(averages, ((0, 1), (2, 3)), world_size=4)
    for form in FORMATS:
        # Half precision rounds each partial sum, and the partial sums are others.
        half = "fp16" in form or "bf16" in form
        tolerance = {"rtol": 0.02, "atol": 0.02} if half else {"rtol": 1e-12, "atol": 1e-13}
        for by_form in results:
            flat, layered = by_form[form]
            torch.testing.assert_close(layered, flat, **tolerance, msg=said_of(form))
            assert torch.equal(layered, results[0][form][1]), form


def batch_of(step: int, rank: int, size: int) -> Any:
    """A rank's uneven share of 9 samples."""
    draw = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(9, 12, generator=draw), torch.randn(9, 3, generator=draw)
    start, stop = share(9, rank, size)
    return inputs[start:stop], targets[start:stop]


def make_engine(layout: str, **options: Any) -> paceline.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    return paceline.Engine(
        model,
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        layout=layout,
        precision="fp64",
        clip_norm=0.5,
        **options,
    )


def train(nodes: Any, layout: str, cases: Any) -> list[Any]:
    """What came of each case's steps: the state, what is used, and what was told."""
    world = believe(nodes)
    found = [train_one(layout, **case) for case in cases]
    world.close()
    return found


def train_one(layout: str, *, state: Any = None, steps: int = 5, **options: Any) -> Any:
    engine = make_engine(layout, **options)
    if state is not None:
        engine.load_state_dict(state)
    for step in range(engine.steps_done, engine.steps_done + steps):
        engine.step(batch_of(step, engine.coordinate.dp, engine.layout.dp))
    sync = internals_of(engine).sync
    assert isinstance(sync, SynchronousSGD)
    used = (sync.reduction.hierarchical, sync.reduction.bucket_mib)
    told = engine.take_notes()
    state = engine.state_dict()
    sync.close()
    return state, used, told


def run(ranks: Any, nodes: Any, *cases: dict[str, Any], layout: str | None = None) -> list[Any]:
    """What came of each case, in one world; the same on all ranks, which must agree to the bit."""
    size = sum(map(len, nodes))
    results = ranks(train, nodes, layout or f"dp={size}", cases, world_size=size, join=False)
    for by_case in results:
        for case, (found, used, _), first in zip(cases, by_case, results[0], strict=True):
            assert used == first[1], case
            assert same(found["model"], first[0]["model"]), case
    first_rank: list[Any] = results[0]
    return first_rank


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


ALWAYS, NEVER = paceline.Reduction(hierarchy="always"), paceline.Reduction(hierarchy="never")
SLOW = {"within": "10 Gbit/s", "across": "100 Mbit/s 1 ms"}


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1), (2,))], ids=str)
def test_training_in_two_levels_is_training(ranks: Any, nodes: Any) -> None:
    cases: list[dict[str, Any]] = [{}, {"microbatch": 1}, {"compress": "fp16"}]
    each = [{**case, "reduction": way} for case in cases for way in (NEVER, ALWAYS, ALWAYS)]
    found = run(ranks, nodes, *each)
    for number, case in enumerate(cases):
        (flat, used_flat, _), (layered, used, told), (again, *_) = found[3 * number :][:3]
        assert (used_flat[0], used[0]) == (False, True), case
        assert told == [], f"{case}: what was asked for is no news"
        assert same(layered["model"], again["model"]), f"{case}: two runs are equal to the bit"
        tolerance = {"rtol": 1e-9, "atol": 1e-11}
        if "compress" in case:
            tolerance = {"rtol": 1e-2, "atol": 1e-2}
        for name, value in flat["model"].items():
            other = layered["model"][name]
            torch.testing.assert_close(other, value, **tolerance, msg=said_of(case))


BOTH = ({"reduction": NEVER}, {"reduction": ALWAYS})


def test_layouts_with_more_than_data_parallelism(ranks: Any) -> None:
    """Copies on both nodes, each split over the ranks of one: a ring a rank, and no two levels."""
    (flat, *_), (layered, used, _) = run(ranks, ((0, 1), (2, 3)), *BOTH, layout="dp=2,tp=2")
    assert used == (False, None), "there is one rank a node in each group"
    assert same(flat["model"], layered["model"])


def test_two_levels_between_copies_that_are_split(ranks: Any) -> None:
    (flat, *_), (layered, used, _) = run(ranks, ((0, 1, 2, 3), (4, 5)), *BOTH, layout="dp=3,tp=2")
    assert used[0]
    for name, value in flat["model"].items():
        torch.testing.assert_close(layered["model"][name], value, rtol=1e-9, atol=1e-11)


def test_auto_goes_by_described_links_and_tells(ranks: Any) -> None:
    described = paceline.Reduction(links=SLOW)
    alike = paceline.Reduction(links={"within": "1 Gbit/s", "across": "1 Gbit/s"})
    cases = {"reduction": described}, {"reduction": alike}
    (state, used, told), (other, used_if_alike, told_if_alike) = run(
        ranks, ((0, 1), (2, 3)), *cases
    )
    assert used == (True, None)
    assert len(told) == 1
    assert "within nodes, then across" in told[0]
    assert "2 nodes with 2 ranks each" in told[0]
    assert used_if_alike == (False, None)
    assert "in one ring" in told_if_alike[0]
    assert state["reduction"]["hierarchical"]
    assert not other["reduction"]["hierarchical"]


def test_auto_measures_where_nothing_is_described(ranks: Any) -> None:
    ((_, used, told),) = run(ranks, ((0, 1), (2, 3)), {})
    assert len(told) == 1
    assert "as measured" in told[0]
    assert ("within nodes, then across" in told[0]) == used[0]


@pytest.mark.parametrize("nodes", [((0, 1, 2),), ((0,), (1,), (2,))], ids=str)
def test_nothing_is_measured_where_there_is_one_level(ranks: Any, nodes: Any) -> None:
    ((state, used, told),) = run(ranks, nodes, {})
    assert (used, told, state["reduction"]) == ((False, None), [], None)


def test_a_resume_keeps_to_what_was_chosen(ranks: Any) -> None:
    """The links described now would choose otherwise: the state says what the run was made with."""
    nodes = ((0, 1), (2, 3))
    described = {"reduction": paceline.Reduction(links=SLOW)}
    (whole, *_), (half, *_) = run(
        ranks, nodes, {**described, "steps": 5}, {**described, "steps": 2}
    )
    ((resumed, used, told),) = run(ranks, nodes, {"state": half, "steps": 3})
    assert (used, told) == ((True, None), [])
    assert same(whole["model"], resumed["model"])
    ((_, used, told),) = run(ranks, ((0, 1, 2, 3),), {"state": half, "steps": 3})
    assert used == (False, None)
    assert "other nodes" in told[0]


def test_buckets_are_tuned_once_and_kept(ranks: Any) -> None:
    tuned = {"reduction": paceline.Reduction(bucket_mib="tuned")}
    (early, used, told), (state, used_later, told_later) = run(
        ranks, ((0, 1, 2),), {**tuned, "steps": 3}, {**tuned, "steps": 4}
    )
    assert (used, told, early["reduction"]) == ((False, None), [], None)
    assert len(told_later) == 1
    assert "backward" in told_later[0]
    assert "as predicted" in told_later[0]
    kept = state["reduction"]
    assert (kept["tuned"], kept["bucket_mib"]) == (True, used_later[1])
    kept["bucket_mib"] = 0.001  # as if that had been best
    ((resumed, used, told),) = run(ranks, ((0, 1, 2),), {**tuned, "state": state, "steps": 6})
    assert (used, told) == ((False, 0.001), [])
    assert resumed["reduction"] == kept


def test_buckets_of_any_size_give_the_same_training(ranks: Any) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"bucket_mib": 0.001},
        {"bucket_mib": 4},
        {"overlap": False},
    ]
    ways = ("always", "never")
    cases = [paceline.Reduction(hierarchy=way, **option) for way in ways for option in options]
    found = run(ranks, ((0, 1), (2, 3)), *({"reduction": case} for case in cases))
    for number, (case, (state, used, _)) in enumerate(zip(cases, found, strict=True)):
        assert used[1] == case.static_mib, case
        first = found[number - number % len(options)][0]
        for name, value in first["model"].items():
            torch.testing.assert_close(
                state["model"][name], value, rtol=1e-9, atol=1e-11, msg=said_of(case)
            )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dp=2,zero=2", {"reduction": ALWAYS}, "sums-need-copies"),
    ("dp=2,zero=1", {"reduction": paceline.Reduction(bucket_mib=4)}, "sums-need-copies"),
    ("tp=2", {"reduction": paceline.Reduction(bucket_mib="tuned")}, "tuning-needs-overlap"),
    (
        "dp=2",
        {"reduction": paceline.Reduction(bucket_mib="tuned"), "compress": "int8"},
        "tuning-needs-plain-bytes",
    ),
]


@pytest.mark.world(2)
def test_what_a_layout_cannot_do_is_refused(ranks: Any) -> None:
    def refused() -> list[str]:
        found = []
        for layout, options, _ in REFUSED:
            with pytest.raises(LayoutError) as error:
                make_engine(layout, **options)
            found.append(str(error.value))
        return found

    for (layout, _, rule), said in zip(REFUSED, ranks(refused)[0], strict=True):
        assert rule in said, layout
