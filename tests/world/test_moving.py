"""Collectives that move data as it is: every dtype, every layout in memory, bit for bit."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.errors import CollectiveMismatch, WorldError
from paceline.world import World, collectives

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
]
SHAPES = [(4,), (2, 3), (), (0,), (2, 0, 3), (1,) * 12]


def pattern(rank: int, dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    """Bytes that differ by rank, as a tensor of ``dtype``; not NaN, so that equal means equal."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count) * 7 + rank * 13 + salt) % (2 if dtype == torch.bool else 50)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: float8 and large unsigned types know no comparison of their own."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


@pytest.mark.world(1, 2, 3, 4)
def test_all_gather_broadcast_and_all_to_all_carry_every_dtype_and_shape(ranks):
    def job():
        world = World.current()
        everyone = range(world.size)
        for dtype in DTYPES:
            for shape in SHAPES:
                mine = pattern(world.rank, dtype, shape)
                gathered = collectives.all_gather(mine)
                assert all(same(gathered[r], pattern(r, dtype, shape)) for r in everyone)

                source = world.size - 1
                copy = mine.clone()
                assert collectives.broadcast(copy, source) is copy
                assert same(copy, pattern(source, dtype, shape))

                pieces = [pattern(world.rank, dtype, shape, salt=to) for to in everyone]
                swapped = collectives.all_to_all(pieces)
                assert all(
                    same(swapped[r], pattern(r, dtype, shape, salt=world.rank)) for r in everyone
                )

    ranks(job)


@pytest.mark.world(2, 3)
def test_all_to_all_takes_uneven_shapes_and_mixed_dtypes(ranks):
    def job():
        world = World.current()
        dtypes = [torch.float32, torch.uint8, torch.int64]

        def piece(source, target):
            return torch.full((source, target + 1), source * 10 + target).to(dtypes[target])

        received = collectives.all_to_all([piece(world.rank, to) for to in range(world.size)])
        for source, tensor in enumerate(received):
            assert same(tensor, piece(source, world.rank))

    ranks(job)


@pytest.mark.world(2)
def test_broadcast_writes_through_views(ranks):
    def job():
        base = torch.full((3, 4), float(World.current().rank))
        collectives.broadcast(base[:, 1], src=1)
        return base

    first, second = ranks(job)
    assert first.tolist() == [[0.0, 1.0, 0.0, 0.0]] * 3
    assert second.tolist() == [[1.0] * 4] * 3


@pytest.mark.world(2)
def test_send_and_recv_carry_every_dtype_and_shape(ranks):
    def job():
        rank = World.current().rank
        for dtype in DTYPES:
            for shape in SHAPES:
                expected = pattern(0, dtype, shape)
                if rank == 0:
                    collectives.send(expected, dst=1)
                    collectives.send(expected, dst=1)
                else:
                    assert same(collectives.recv(src=0), expected)
                    out = torch.empty(shape, dtype=dtype)
                    assert collectives.recv(src=0, out=out) is out
                    assert same(out, expected)

    ranks(job)


@pytest.mark.world(2)
def test_recv_into_the_wrong_tensor_drops_the_message_and_goes_on(ranks):
    def job():
        if World.current().rank == 0:
            for value in (1.0, 2.0, 3.0):
                collectives.send(torch.full((4,), value), dst=1)
            return None
        messages = []
        for out in (torch.zeros(5), torch.zeros(4, dtype=torch.int32)):
            with pytest.raises(CollectiveMismatch) as caught:
                collectives.recv(src=0, out=out)
            messages.append(str(caught.value))
            assert not out.any()  # not touched
        return messages, collectives.recv(src=0).tolist()

    messages, third = ranks(job)[1]
    assert "rank 0 sent float32 (4,) but out is float32 (5,)" in messages[0]
    assert "rank 0 sent float32 (4,) but out is int32 (4,)" in messages[1]
    assert third == [3.0] * 4


@pytest.mark.world(2)
def test_a_refused_send_reaches_the_receiver(ranks):
    def job():
        if World.current().rank == 0:
            with pytest.raises(WorldError, match=r"takes a torch\.Tensor, not int"):
                collectives.send(3, dst=1)
            collectives.send(torch.ones(1), dst=1)
        else:
            with pytest.raises(CollectiveMismatch, match=r"rank 0 refused its send.*not int"):
                collectives.recv(src=0)
            assert collectives.recv(src=0).item() == 1

    ranks(job)


@pytest.mark.world(1, 2, 4)
def test_objects_travel(ranks):
    def job():
        world = World.current()
        mine = {"rank": world.rank, "big": "x" * (1000 * world.rank), "t": torch.ones(2)}
        root = world.size - 1

        everyone = collectives.all_gather_object(mine)
        assert [o["rank"] for o in everyone] == list(range(world.size))
        assert [len(o["big"]) for o in everyone] == [1000 * r for r in range(world.size)]

        assert collectives.broadcast_object(mine, src=root)["rank"] == root
        assert collectives.broadcast_object(
            "only the source counts" if world.is_main else None
        ) == ("only the source counts")

        gathered = collectives.gather_object(mine, dst=root)
        if world.rank == root:
            assert [o["rank"] for o in gathered] == list(range(world.size))
        else:
            assert gathered is None

        objects = [f"for {r}" for r in range(world.size)] if world.rank == root else None
        assert collectives.scatter_object(objects, src=root) == f"for {world.rank}"

        for empty in (None, "", [], {}):
            assert collectives.all_gather_object(empty) == [empty] * world.size

    ranks(job)


class Point:
    def __init__(self, x):
        self.x = x


@pytest.mark.world(2)
def test_objects_of_classes_that_no_rank_can_import(ranks):
    """A class of a script, a notebook or a test, and what only cloudpickle can pickle."""

    def job():
        rank = World.current().rank
        points = collectives.all_gather_object(Point(rank))
        assert all(type(point) is Point for point in points)
        double = collectives.broadcast_object((lambda x: 2 * x) if rank == 0 else None)
        return [point.x for point in points], double(4)

    assert ranks(job) == [([0, 1], 8)] * 2


@pytest.mark.world(2)
def test_large_tensors_survive(ranks):
    def job():
        world = World.current()
        tensor = torch.arange(3_000_000) * (world.rank + 1)
        gathered = collectives.all_gather(tensor)
        assert torch.equal(gathered[1], gathered[0] * 2)
        if world.rank == 0:
            collectives.send(tensor, dst=1)
        else:
            assert torch.equal(collectives.recv(src=0), gathered[0])

    ranks(job)


def test_a_world_of_one_needs_no_process_group():
    tensor = torch.tensor([1.0, 2.0])
    with World.init() as world:
        assert (world.rank, world.size, world.backend) == (0, 1, "none")
        assert collectives.all_reduce(tensor.clone(), "mean").tolist() == [1.0, 2.0]
        gathered = collectives.all_gather(tensor)
        gathered[0].zero_()
        collectives.reduce_scatter(tensor).zero_()
        collectives.all_to_all([tensor])[0].zero_()
        assert tensor.tolist() == [1.0, 2.0]  # results are copies, as in a larger world
        assert collectives.broadcast(tensor) is tensor
        collectives.barrier()
        collectives.barrier(timeout=1)
        assert collectives.broadcast_object({"a": 1}) == {"a": 1}
        assert collectives.all_gather_object(1) == [1]
        assert collectives.gather_object(1) == [1]
        assert collectives.scatter_object([1]) == 1
        assert not torch.distributed.is_initialized()
        with pytest.raises(WorldError, match="dst=0 is this rank itself"):
            collectives.send(tensor, dst=0)


WRONG_CALLS = [
    (lambda: collectives.broadcast(torch.ones(1), src=2), r"src=2 is not a rank.*one of \[0, 1\]"),
    (lambda: collectives.broadcast(torch.ones(1), src="0"), r"src='0' must be a rank"),
    (lambda: collectives.broadcast_object(1, src=-1), r"src=-1 is not a rank"),
    (lambda: collectives.gather_object(1, dst=9), r"dst=9 is not a rank"),
    (lambda: collectives.scatter_object([1], src=True), r"src=True must be a rank"),
    (lambda: collectives.scatter_object([1, 2, 3]), r"a list of 2 objects.*got 3 objects"),
    (lambda: collectives.all_to_all([torch.ones(1)]), r"a list of 2 tensors.*got 1"),
    (lambda: collectives.all_to_all(torch.ones(2)), r"a list of 2 tensors.*got a Tensor"),
    (lambda: collectives.all_gather_object(threading.Lock()), r"this lock cannot be pickled"),
    (lambda: collectives.all_gather([1, 2]), r"takes a torch.Tensor, not list"),
    (lambda: collectives.barrier(timeout=0), r"timeout=0 must be a number of seconds above 0"),
    (lambda: collectives.all_gather(torch.ones(1), group=[0]), r"made by world.group.*not a list"),
    (lambda: collectives.recv(src=7), r"src=7 is not a rank"),
]


@pytest.mark.world(2)
def test_wrong_calls_are_named_on_every_rank_and_ranks_stay_in_step(ranks):
    def job():
        for call, message in WRONG_CALLS:
            with pytest.raises(WorldError, match=message):
                call()
            collectives.barrier()

    ranks(job)
