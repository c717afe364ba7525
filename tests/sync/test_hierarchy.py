"""A sum in two levels is the sum: to rounding that of one ring, to the bit the same everywhere."""

from __future__ import annotations

import os
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


def sums(nodes: Any, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    flat, layered = wires(nodes)
    own = [values_of(flat.rank, size, dtype) for size in SIZES]
    return [(flat.sum(v.clone()), layered.sum(v.clone()), layered.sum(v.clone())) for v in own]


@pytest.mark.parametrize("nodes", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32], ids=str)
def test_same_sum_as_one_ring_and_equal_to_the_bit_on_all_ranks(
    ranks: Any, nodes: Any, dtype: torch.dtype
) -> None:
    results = ranks(sums, nodes, dtype, world_size=sum(map(len, nodes)))
    tolerance = {"rtol": 1e-13, "atol": 1e-14} if dtype == torch.float64 else {}
    if dtype == torch.float16:
        tolerance = {"rtol": 5e-3, "atol": 2e-2}  # each of up to four additions rounds
    for by_rank in zip(*results, strict=True):
        first = by_rank[0][1]
        for flat, layered, again in by_rank:
            torch.testing.assert_close(layered, flat, **tolerance)
            assert torch.equal(layered, first)
            assert torch.equal(again, first)


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


def averages(nodes: Any, form: str) -> list[torch.Tensor]:
    """A matrix and a vector through one exchange by a ring and one in two levels."""
    flat, layered = wires(nodes)
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


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_takes_either_way(ranks: Any, form: str) -> None:
    results = ranks(averages, ((0, 1), (2, 3)), form, world_size=4)
    # Half precision rounds each partial sum, and the partial sums are others.
    half = "fp16" in form or "bf16" in form
    tolerance = {"rtol": 0.02, "atol": 0.02} if half else {"rtol": 1e-12, "atol": 1e-13}
    for flat, layered in results:
        torch.testing.assert_close(layered, flat, **tolerance)
        assert torch.equal(layered, results[0][1])


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


def train(nodes: Any, layout: str, state: Any, steps: int, options: Any) -> Any:
    """What came of some steps: the state, what is used, and what was told."""
    world = believe(nodes)
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
    world.close()
    return state, used, told


def run(
    ranks: Any,
    nodes: Any,
    layout: str | None = None,
    *,
    state: Any = None,
    steps: int = 5,
    **options: Any,
) -> Any:
    """The same of all ranks, which must agree to the bit."""
    size = sum(map(len, nodes))
    arguments = (nodes, layout or f"dp={size}", state, steps, options)
    results = ranks(train, *arguments, world_size=size, join=False)
    for found, used, _ in results:
        assert used == results[0][1]
        assert same(found["model"], results[0][0]["model"])
    return results[0]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


ALWAYS, NEVER = paceline.Reduction(hierarchy="always"), paceline.Reduction(hierarchy="never")
SLOW = {"within": "10 Gbit/s", "across": "100 Mbit/s 1 ms"}


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1), (2,))], ids=str)
@pytest.mark.parametrize("options", [{}, {"microbatch": 1}, {"compress": "fp16"}], ids=str)
def test_training_in_two_levels_is_training(ranks: Any, nodes: Any, options: Any) -> None:
    flat, used_flat, _ = run(ranks, nodes, reduction=NEVER, **options)
    layered, used, told = run(ranks, nodes, reduction=ALWAYS, **options)
    again, *_ = run(ranks, nodes, reduction=ALWAYS, **options)
    assert (used_flat[0], used[0]) == (False, True)
    assert told == [], "what was asked for is no news"
    assert same(layered["model"], again["model"]), "two runs are equal to the bit"
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if "compress" not in options else {"atol": 1e-2}
    if "compress" in options:
        tolerance["rtol"] = 1e-2
    for name, value in flat["model"].items():
        torch.testing.assert_close(layered["model"][name], value, **tolerance)


def test_layouts_with_more_than_data_parallelism(ranks: Any) -> None:
    """Copies on both nodes, each split over the ranks of one: a ring a rank, and no two levels."""
    nodes = ((0, 1), (2, 3))
    flat, *_ = run(ranks, nodes, "dp=2,tp=2", reduction=NEVER)
    layered, used, _ = run(ranks, nodes, "dp=2,tp=2", reduction=ALWAYS)
    assert used == (False, None), "there is one rank a node in each group"
    assert same(flat["model"], layered["model"])


def test_two_levels_between_copies_that_are_split(ranks: Any) -> None:
    nodes = ((0, 1, 2, 3), (4, 5))
    flat, *_ = run(ranks, nodes, "dp=3,tp=2", reduction=NEVER)
    layered, used, _ = run(ranks, nodes, "dp=3,tp=2", reduction=ALWAYS)
    assert used[0]
    for name, value in flat["model"].items():
        torch.testing.assert_close(layered["model"][name], value, rtol=1e-9, atol=1e-11)


def test_auto_goes_by_described_links_and_tells(ranks: Any) -> None:
    reduction = paceline.Reduction(links=SLOW)
    state, used, told = run(ranks, ((0, 1), (2, 3)), reduction=reduction)
    assert used == (True, None)
    assert len(told) == 1
    assert "within nodes, then across" in told[0]
    assert "2 nodes with 2 ranks each" in told[0]
    alike = paceline.Reduction(links={"within": "1 Gbit/s", "across": "1 Gbit/s"})
    other, used, told = run(ranks, ((0, 1), (2, 3)), reduction=alike)
    assert used == (False, None)
    assert "in one ring" in told[0]
    assert state["reduction"]["hierarchical"]
    assert not other["reduction"]["hierarchical"]


def test_auto_measures_where_nothing_is_described(ranks: Any) -> None:
    _, used, told = run(ranks, ((0, 1), (2, 3)))
    assert len(told) == 1
    assert "as measured" in told[0]
    assert ("within nodes, then across" in told[0]) == used[0]


@pytest.mark.parametrize("nodes", [((0, 1, 2),), ((0,), (1,), (2,))], ids=str)
def test_nothing_is_measured_where_there_is_one_level(ranks: Any, nodes: Any) -> None:
    state, used, told = run(ranks, nodes)
    assert (used, told, state["reduction"]) == ((False, None), [], None)


def test_a_resume_keeps_to_what_was_chosen(ranks: Any) -> None:
    """The links described now would choose otherwise: the state says what the run was made with."""
    nodes = ((0, 1), (2, 3))
    described = paceline.Reduction(links=SLOW)
    whole, *_ = run(ranks, nodes, reduction=described, steps=5)
    half, *_ = run(ranks, nodes, reduction=described, steps=2)
    resumed, used, told = run(ranks, nodes, state=half, steps=3)
    assert (used, told) == ((True, None), [])
    assert same(whole["model"], resumed["model"])
    _, used, told = run(ranks, ((0, 1, 2, 3),), state=half, steps=3)
    assert used == (False, None)
    assert "other nodes" in told[0]


def test_buckets_are_tuned_once_and_kept(ranks: Any) -> None:
    tuned = paceline.Reduction(bucket_mib="tuned")
    early, used, told = run(ranks, ((0, 1, 2),), reduction=tuned, steps=3)
    assert (used, told, early["reduction"]) == ((False, None), [], None)
    state, used, told = run(ranks, ((0, 1, 2),), reduction=tuned, steps=4)
    assert len(told) == 1
    assert "backward" in told[0]
    assert "as predicted" in told[0]
    kept = state["reduction"]
    assert (kept["tuned"], kept["bucket_mib"]) == (True, used[1])
    kept["bucket_mib"] = 0.001  # as if that had been best
    resumed, used, told = run(ranks, ((0, 1, 2),), state=state, reduction=tuned, steps=6)
    assert (used, told) == ((False, 0.001), [])
    assert resumed["reduction"] == kept


@pytest.mark.parametrize("hierarchy", ["always", "never"])
def test_buckets_of_any_size_give_the_same_training(ranks: Any, hierarchy: str) -> None:
    nodes = ((0, 1), (2, 3))
    options = [{}, {"bucket_mib": 0.001}, {"bucket_mib": 4}, {"overlap": False}]
    models = []
    for option in options:
        reduction = paceline.Reduction(hierarchy=hierarchy, **option)
        state, used, _ = run(ranks, nodes, reduction=reduction)
        assert used[1] == reduction.static_mib
        models.append(state["model"])
    for model in models[1:]:
        for name, value in models[0].items():
            torch.testing.assert_close(model[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("layout", "options", "rule"),
    [
        ("dp=2,zero=2", {"reduction": ALWAYS}, "sums-need-copies"),
        ("dp=2,zero=1", {"reduction": paceline.Reduction(bucket_mib=4)}, "sums-need-copies"),
        ("tp=2", {"reduction": paceline.Reduction(bucket_mib="tuned")}, "tuning-needs-overlap"),
        (
            "dp=2",
            {"reduction": paceline.Reduction(bucket_mib="tuned"), "compress": "int8"},
            "tuning-needs-plain-bytes",
        ),
    ],
)
@pytest.mark.world(2)
def test_what_a_layout_cannot_do_is_refused(
    ranks: Any, layout: str, options: Any, rule: str
) -> None:
    def refused() -> str:
        with pytest.raises(LayoutError) as error:
            make_engine(layout, **options)
        return str(error.value)

    assert rule in ranks(refused)[0]
