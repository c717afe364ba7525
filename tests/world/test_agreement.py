"""Ranks that disagree raise, all of them, naming each rank's call; nobody hangs or dies."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import CollectiveMismatch, WorldError
from paceline.world import World, collectives

F32, I32 = torch.float32, torch.int32

# What rank 1 does, and what every other rank does.
MISMATCHES = {
    "shape": (
        lambda: collectives.all_reduce(torch.zeros(3)),
        lambda: collectives.all_reduce(torch.zeros(4)),
        ["rank 0: all_reduce(sum) of float32 (4,)", "rank 1: all_reduce(sum) of float32 (3,)"],
    ),
    "same number of elements": (
        lambda: collectives.all_reduce(torch.zeros(2, 3)),
        lambda: collectives.all_reduce(torch.zeros(3, 2)),
        ["rank 1: all_reduce(sum) of float32 (2, 3)"],
    ),
    "dtype": (
        lambda: collectives.all_reduce(torch.zeros(3, dtype=I32)),
        lambda: collectives.all_reduce(torch.zeros(3)),
        ["rank 0: all_reduce(sum) of float32 (3,)", "rank 1: all_reduce(sum) of int32 (3,)"],
    ),
    "reduction": (
        lambda: collectives.all_reduce(torch.zeros(3), "max"),
        lambda: collectives.all_reduce(torch.zeros(3), "sum"),
        ["rank 1: all_reduce(max)"],
    ),
    "operation": (
        lambda: collectives.all_gather(torch.zeros(3)),
        lambda: collectives.all_reduce(torch.zeros(3)),
        ["rank 0: all_reduce(sum)", "rank 1: all_gather of float32 (3,)"],
    ),
    "root": (
        lambda: collectives.broadcast(torch.zeros(3), src=1),
        lambda: collectives.broadcast(torch.zeros(3), src=0),
        ["rank 0: broadcast(src=0)", "rank 1: broadcast(src=1)"],
    ),
    "gather shape": (
        lambda: collectives.all_gather(torch.zeros(3, 1)),
        lambda: collectives.all_gather(torch.zeros(3)),
        ["rank 1: all_gather of float32 (3, 1)"],
    ),
    "scatter shape": (
        lambda: collectives.reduce_scatter(torch.zeros(6)),
        lambda: collectives.reduce_scatter(torch.zeros(12)),
        ["rank 0: reduce_scatter(sum) of float32 (12,)"],
    ),
    "barrier against reduction": (
        lambda: collectives.barrier(),
        lambda: collectives.all_reduce(torch.zeros(3)),
        ["rank 1: barrier"],
    ),
    "object against tensor": (
        lambda: collectives.broadcast_object("x"),
        lambda: collectives.broadcast(torch.zeros(3)),
        ["rank 0: broadcast(src=0) of float32 (3,)", "rank 1: broadcast_object(src=0)"],
    ),
    "object root": (
        lambda: collectives.gather_object(1, dst=1),
        lambda: collectives.gather_object(1, dst=0),
        ["rank 1: gather_object(dst=1)"],
    ),
    "all_to_all against all_gather": (
        lambda: collectives.all_to_all([torch.zeros(1)] * World.current().size),
        lambda: collectives.all_gather(torch.zeros(1)),
        ["rank 1: all_to_all"],
    ),
    "group against barrier": (
        lambda: World.current().group([0]),
        lambda: collectives.barrier(),
        ["rank 1: world.group([0])"],
    ),
    "different groups": (
        lambda: World.current().group([0]),
        lambda: World.current().group([1]),
        ["rank 0: world.group([1])", "rank 1: world.group([0])"],
    ),
    "one of many dimensions": (
        lambda: collectives.all_reduce(torch.zeros((1,) * 20 + (2,))),
        lambda: collectives.all_reduce(torch.zeros((1,) * 20 + (3,))),
        ["all_reduce(sum) of float32 (1, 1"],
    ),
    "empty against full": (
        lambda: collectives.all_reduce(torch.zeros(0)),
        lambda: collectives.all_reduce(torch.zeros(3)),
        ["rank 1: all_reduce(sum) of float32 (0,)"],
    ),
}


@pytest.mark.world(2, 3)
@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_raises_everywhere_and_the_world_lives_on(ranks, case):
    def job():
        odd, others, _ = MISMATCHES[case]
        world = World.current()
        with pytest.raises(CollectiveMismatch) as caught:
            (odd if world.rank == 1 else others)()
        assert collectives.all_reduce(torch.ones(1)).item() == world.size
        return str(caught.value)

    texts = ranks(job)
    assert len(set(texts)) == 1  # the same story on every rank
    for expected in MISMATCHES[case][2]:
        assert expected in texts[0]


@pytest.mark.world(3)
def test_a_call_refused_by_one_rank_is_explained_to_the_others(ranks):
    def job():
        world = World.current()
        dtype = torch.int64 if world.rank == 2 else F32
        with pytest.raises(WorldError) as caught:
            collectives.all_reduce(torch.zeros(3, dtype=dtype), "mean")
        collectives.barrier()
        return type(caught.value).__name__, str(caught.value)

    first, second, third = ranks(job)
    assert third[0] == "WorldError"
    assert third[1].startswith("all_reduce: the mean of int64")
    assert first == second
    assert first[0] == "CollectiveMismatch"
    assert "rank 2: refused: all_reduce: the mean of int64" in first[1]


@pytest.mark.world(2)
def test_checks_can_be_switched_off_by_call(ranks):
    def job():
        world = World.current()
        assert world.checks
        results = [
            collectives.all_reduce(torch.ones(2), checks=False),
            collectives.all_gather(torch.ones(2), checks=False)[1],
            collectives.reduce_scatter(torch.ones(2), checks=False),
            collectives.broadcast(torch.ones(2), checks=False),
            collectives.all_to_all([torch.ones(2)] * 2, checks=False)[0],
        ]
        # A call that makes no sense is still refused, by this rank alone.
        with pytest.raises(WorldError, match="op='avg'"):
            collectives.all_reduce(torch.ones(2), "avg", checks=False)
        return [result.tolist() for result in results]

    assert ranks(job) == [[[2, 2], [1, 1], [2], [1, 1], [1, 1]]] * 2


@pytest.mark.world(2)
def test_checks_can_be_switched_off_for_the_world(ranks):
    def job():
        with World.init(checks=False, device="cpu") as world:
            assert world.info()["checks"] is False
            collectives.all_reduce(torch.ones(2))
            assert world.everyone.next_call() == 1  # nothing was compared
            return collectives.all_gather_object(world.rank)  # sizes always travel first

    assert ranks(job, join=False) == [[0, 1]] * 2


@pytest.mark.world(3)
def test_a_barrier_that_times_out_names_the_ranks_that_did_not_come(ranks, tmp_path):
    def job():
        import time

        rank = World.current().rank
        collectives.barrier()  # all set out together
        if rank == 1:
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            return "late"
        with pytest.raises(WorldError) as caught:
            collectives.barrier(timeout=2)
        (tmp_path / str(rank)).touch()
        return str(caught.value)

    texts = ranks(job)
    for text in (texts[0], texts[2]):
        assert "waited 2 s in barrier" in text
        assert "Ranks that did not come: [1]." in text


@pytest.mark.world(2)
def test_a_peer_that_leaves_is_reported_with_the_call_that_failed(ranks):
    def job():
        world = World.current()
        if world.rank == 1:
            world.close()
            return None
        with pytest.raises(WorldError) as caught:
            collectives.all_reduce(torch.ones(2))
        return str(caught.value)

    text = ranks(job)[0]
    assert text.startswith("all_reduce(sum) of float32 (2,) failed on rank 0:")
    assert "Another rank has probably died or left the world" in text
