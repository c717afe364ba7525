"""Horovod's collectives on real ranks, against the same arithmetic in one process."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.common.exceptions import DuplicateNameError, HorovodInternalError

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    whole = (torch.arange(torch.Size(shape).numel()) * (rank + 1) + rank) % 5
    return (whole > 1 if dtype == torch.bool else whole).to(dtype).reshape(shape)


def reductions() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*FLOATS, *INTS]:
        stack = torch.stack([values(other, dtype).double() for other in range(size)])
        mine = values(rank, dtype)
        expected = {
            hvd.Sum: stack.sum(0),
            # Whole numbers are cut off, as Horovod does.
            hvd.Average: stack.sum(0) * (1 / size),
            hvd.Min: stack.amin(0),
            hvd.Max: stack.amax(0),
            hvd.Product: stack.prod(0),
        }
        for op, result in expected.items():
            torch.testing.assert_close(hvd.allreduce(mine, op=op), result.to(dtype))
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        torch.testing.assert_close(scaled, stack.sum(0).to(dtype))
        assert torch.equal(mine, values(rank, dtype))
    stack = torch.stack([values(other, torch.bool) for other in range(size)])
    assert torch.equal(hvd.allreduce(values(rank, torch.bool), op=hvd.Sum), stack.any(0))
    assert torch.equal(hvd.allreduce(values(rank, torch.bool), op=hvd.Product), stack.all(0))
    with pytest.raises(ValueError, match="cannot be averaged"):
        hvd.allreduce(values(rank, torch.bool))
    big = torch.randn(50_001, generator=torch.Generator().manual_seed(rank))
    total = big.new_zeros(50_001)
    for other in range(size):
        total += torch.randn(50_001, generator=torch.Generator().manual_seed(other))
    in_place = big.clone().t()
    assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
    assert torch.equal(in_place, total)  # bitwise: added in the order of ranks
    group = hvd.grouped_allreduce([big, values(rank, torch.int32), big[:5]], op=hvd.Sum)
    assert torch.equal(group[0], total)
    assert torch.equal(group[2], total[:5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(hvd.allreduce(big, average=False), total)
    with pytest.raises(ValueError, match="only one of them"):
        hvd.allreduce(big, average=False, op=hvd.Sum)


def moves() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*FLOATS, *INTS, torch.bool]:
        parts = [values(other, dtype, (other % 3, 2)) for other in range(size)]
        assert torch.equal(hvd.allgather(parts[rank]), torch.cat(parts))
        root = values(size - 1, dtype)
        assert torch.equal(hvd.broadcast(values(rank, dtype), size - 1), root)
        rows = values(rank, dtype, (size + 1, 2))
        mine, received = hvd.alltoall(rows, splits=[1] * (size - 1) + [2])
        count = 2 if rank == size - 1 else 1
        sent = [values(other, dtype, (size + 1, 2))[rank : rank + count] for other in range(size)]
        assert torch.equal(mine, torch.cat(sent))
        assert received.tolist() == [count] * size
    assert torch.equal(hvd.alltoall(torch.full((size,), rank)), torch.arange(size))
    rows = torch.arange(2.0 * (size + 1)).reshape(size + 1, 2)
    mine = hvd.reducescatter(rows, op=hvd.Sum)
    begin = 0 if rank == 0 else rank + 1
    assert torch.equal(mine, rows[begin : begin + (2 if rank == 0 else 1)] * size)
    with pytest.raises(HorovodInternalError, match="rank-zero"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(HorovodInternalError, match="only supports"):
        hvd.reducescatter(rows, op=hvd.Max)
    dense = torch.zeros(4, 2)
    dense[rank % 4] = rank + 1
    summed = hvd.sparse_allreduce_async(dense.to_sparse(), "sparse", hvd.Sum)()
    assert torch.equal(summed.to_dense(), hvd.allreduce(dense, op=hvd.Sum))


def gradients() -> None:
    """What Horovod's own functions give, for an output whose gradient is ones on every rank."""
    rank, size = hvd.rank(), hvd.size()
    cases = {
        "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), float(size)),
        "allgather": (hvd.allgather, 1.0),
        "broadcast": (lambda x: hvd.broadcast(x, 0), 1.0 if rank == 0 else 0.0),
        "alltoall": (hvd.alltoall, 1.0),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), float(size)),
    }
    for name, (function, expected) in cases.items():
        x = torch.ones(2 * size, 3, requires_grad=True)
        function(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, expected)), name


def names_and_errors() -> None:
    rank, size = hvd.rank(), hvd.size()
    names = [f"n{number}" for number in range(8)]
    order = names if rank % 2 else names[::-1]
    handles = {n: hvd.allreduce_async(torch.full((3,), float(n[1:])), name=n) for n in order}
    for name in names:
        result = hvd.synchronize(handles[name])
        assert result.tolist() == [float(name[1:])] * 3
        assert hvd.synchronize(handles[name]) is None
    if rank == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        assert not hvd.poll(first)
        with pytest.raises(DuplicateNameError, match=r"allreduce\.twice"):
            hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.barrier()
    if rank > 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.synchronize(first)
    with pytest.raises(HorovodInternalError, match=r"allreduce\.bad.*rank 0 has \[2\], but rank 1"):
        hvd.allreduce(torch.ones(2 + rank), name="bad")
    with pytest.raises(HorovodInternalError, match="root ranks"):
        hvd.broadcast(torch.ones(2), rank)
    # One rank's arguments are wrong: it says so, and the others do not wait for it.
    expected = ValueError if rank == 0 else HorovodInternalError
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, 0)):
        with pytest.raises(expected, match=r"expected a torch\.Tensor, got a float"):
            call(1.0 if rank == 0 else torch.ones(size))
    with pytest.raises(expected, match="multiple of the number of workers"):
        hvd.alltoall(torch.ones(size + 1 if rank == 0 else size))
    with pytest.raises(HorovodInternalError, match="no rank can go on"):
        hvd.broadcast(torch.ones(2), 0) if rank == 0 else hvd.allreduce(torch.ones(2))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def joining() -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank != 0:
        averaged = hvd.allreduce(torch.full((4,), 4.0 * size), name="uneven")
        assert averaged.tolist() == [4.0 * (size - 1)] * 4
        with pytest.raises(HorovodInternalError, match="not supported with Join"):
            hvd.broadcast(torch.ones(1), 1)
    last = hvd.join()
    assert last != 0
    assert hvd.allgather(torch.tensor([last])).tolist() == [last] * size


def process_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, size = hvd.rank(), hvd.size()
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS", raising=False)
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        hvd.add_process_set([0])
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    even = hvd.add_process_set(range(0, size, 2))
    odd = hvd.add_process_set(hvd.ProcessSet(range(1, size, 2)))
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert mine.included()
    assert (mine.rank(), other.included()) == (rank // 2, False)
    summed = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine)
    assert summed.item() == sum(mine.ranks)
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
    with pytest.raises(ValueError, match=f"Rank {rank} is not a member"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="duplicate process set"):
        hvd.add_process_set(range(0, size, 2))
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
    with pytest.raises(ValueError, match="not been registered"):
        hvd.allreduce(torch.ones(1), process_set=mine)


def adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    level = [torch.linspace(-1, 2, 7, dtype=torch.float64) * (r + 1) + r**2 for r in range(size)]
    mine = level[rank]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [
            (1 - a.dot(b) / (2 * a.dot(a))) * a + (1 - a.dot(b) / (2 * b.dot(b))) * b
            for a, b in pairs
        ]
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum), level[0])


@pytest.mark.world(1, 2, 3, 4)
def test_collectives_equal_one_process(ranks):
    def job() -> None:
        hvd.init()
        try:
            reductions()
            moves()
            gradients()
            adasum()
            if hvd.size() > 1:
                names_and_errors()
                joining()
                with pytest.MonkeyPatch.context() as monkeypatch:
                    process_sets(monkeypatch)
        finally:
            hvd.shutdown()

    ranks(job)


@pytest.mark.world(2)
def test_the_first_rank_that_leaves_ends_it_for_all_and_ranks_can_begin_again(ranks):
    def job() -> None:
        hvd.init(process_sets=[hvd.ProcessSet([1])])
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1))
            hvd.shutdown()
            assert not hvd.is_initialized()
        else:
            hvd.allreduce(torch.ones(1))
            with pytest.raises(HorovodInternalError, match="shut down"):
                hvd.allreduce(torch.ones(1), name="alone")
            with pytest.raises(HorovodInternalError, match="rank 0 did"):
                hvd.allreduce(torch.ones(1), name="late")
            hvd.shutdown()
        with pytest.raises(ValueError, match=r"hvd\.init"):
            hvd.rank()
        open_files: list[int] = []
        for _ in range(4):
            hvd.init()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            hvd.shutdown()
            open_files.append(len(os.listdir("/proc/self/fd")))
        # What the kernel has not closed yet of the last world is less than one world has.
        assert open_files[-1] - open_files[0] < 12, open_files

    ranks(job)
