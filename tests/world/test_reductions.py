"""all_reduce and reduce_scatter against the same arithmetic in one process."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import WorldError
from paceline.world import World, collectives

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]

# What each operation has an answer for.
CASES = {
    "sum": [*FLOATS, *INTEGERS, *COMPLEX],
    "mean": [*FLOATS, *COMPLEX],
    "product": [*FLOATS, *INTEGERS, *COMPLEX],
    "max": [*FLOATS, *INTEGERS, torch.bool],
    "min": [*FLOATS, *INTEGERS, torch.bool],
}


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly, different on every rank."""
    count = torch.Size(shape).numel()
    whole = (torch.arange(count) * (rank + 1) + rank) % 5
    if dtype == torch.bool:
        return (whole > 1).reshape(shape)
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole - 2).double()).to(dtype).reshape(shape)
    if dtype.is_signed:
        whole = whole - 2
    return whole.to(dtype).reshape(shape)


def reference(op: str, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stack = torch.stack([values(rank, dtype, shape).to(wide) for rank in range(size)])
    result = {
        "sum": lambda: stack.sum(0),
        "mean": lambda: stack.mean(0),
        "product": lambda: stack.prod(0),
        "max": lambda: stack.amax(0),
        "min": lambda: stack.amin(0),
    }[op]()
    return result.to(dtype)


@pytest.mark.world(1, 2, 3, 4)
@pytest.mark.parametrize("op", CASES)
def test_all_reduce_equals_one_process_for_every_dtype_and_shape(ranks, op):
    def job():
        world = World.current()
        for dtype in CASES[op]:
            for shape in [(5,), (2, 3), (), (0,), (3, 0, 2)]:
                tensor = values(world.rank, dtype, shape)
                returned = collectives.all_reduce(tensor, op)
                assert returned is tensor
                # Whole numbers are exact in every dtype; a mean is rounded once.
                torch.testing.assert_close(
                    tensor, reference(op, dtype, shape, world.size), rtol=1e-15, atol=0
                )

    ranks(job)


@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("op", CASES)
def test_reduce_scatter_gives_each_rank_its_slice(ranks, op):
    def job():
        world = World.current()
        for dtype in CASES[op]:
            for shape in [(4,), (8, 3), (0, 3), (4, 0)]:
                mine = collectives.reduce_scatter(values(world.rank, dtype, shape), op)
                whole = reference(op, dtype, shape, world.size)
                step = shape[0] // world.size
                expected = whole[world.rank * step : (world.rank + 1) * step]
                torch.testing.assert_close(mine, expected, rtol=1e-15, atol=0)

    ranks(job)


@pytest.mark.world(2)
def test_memory_layouts_keep_their_strides_and_neighbours(ranks):
    def job():
        rank = World.current().rank
        base = torch.zeros(4, 6)
        view = base[1:3, ::2].t()  # non-contiguous, transposed, inside a larger tensor
        view += rank + 1
        collectives.all_reduce(view)
        assert view.stride() == (2, 6)
        assert base.sum() == 6 * 3.0  # six elements of 1 + 2; the rest untouched

        channels_last = torch.full((2, 3, 4, 4), 1.0).to(memory_format=torch.channels_last)
        collectives.all_reduce(channels_last)
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
        assert bool((channels_last == 2).all())

        conjugate = torch.tensor([1 + 2j]).conj()
        assert collectives.all_gather(conjugate)[0].item() == 1 - 2j
        assert collectives.all_reduce(conjugate).item() == 2 - 4j

    ranks(job)


@pytest.mark.world(2)
def test_parameters_are_reduced_without_autograd_noticing(ranks):
    def job():
        rank = World.current().rank
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        collectives.all_reduce(parameter, "mean")
        assert parameter.tolist() == [0.5] * 3
        assert parameter.is_leaf
        assert parameter.grad_fn is None
        gathered = collectives.all_gather(parameter * 2)
        assert not gathered[0].requires_grad
        parameter.sum().backward()

    ranks(job)


@pytest.mark.world(2, 3)
def test_nan_wins_in_max_and_min_on_every_rank(ranks):
    def job():
        rank = World.current().rank
        seen = []
        for op in ("max", "min"):
            for where in range(World.current().size):
                t = torch.tensor([float("nan") if rank == where else 1.0, float(rank)])
                seen.append(collectives.all_reduce(t, op).isnan().tolist())
        return seen

    for seen in ranks(job):
        assert all(row == [True, False] for row in seen)


@pytest.mark.world(4)
def test_mean_of_half_floats_is_accumulated_in_float32(ranks):
    def job():
        # 2048 + 1 is not a float16: adding four of these in float16 loses the ones.
        tensor = torch.tensor([2049.0, 60000.0], dtype=torch.float32).half()
        return collectives.all_reduce(tensor, "mean")

    expected = torch.tensor([2049.0, 60000.0]).half()
    for result in ranks(job):
        assert torch.equal(result, expected)  # a float16 sum of the second is infinite


@pytest.mark.world(3)
def test_results_are_the_same_bits_on_every_rank(ranks):
    def job():
        generator = torch.Generator().manual_seed(World.current().rank)
        data = torch.randn(1000, generator=generator)
        return [collectives.all_reduce(data.clone(), op) for op in ("sum", "mean", "product")]

    first, *others = ranks(job)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


REFUSED = [
    ("sum", torch.bool, "use op='max' for any, op='min' for all"),
    ("mean", torch.bool, "mean of bool"),
    ("mean", torch.int64, "mean of int64 values need not be whole"),
    ("max", torch.complex64, "complex numbers have no max"),
    ("sum", torch.float8_e4m3fn, "float8_e4m3fn can be moved but not reduced"),
    ("max", torch.uint16, "uint16 can be moved but not reduced"),
    ("avg", torch.float32, "op='avg' must be one of sum, mean, max, min, product"),
    (None, torch.float32, "op=None must be one of"),
]


@pytest.mark.parametrize(("op", "dtype", "message"), REFUSED)
def test_reductions_without_an_answer_are_refused_in_a_world_of_one_too(op, dtype, message):
    tensor = torch.zeros(4, dtype=torch.uint8).to(dtype)
    for call in (collectives.all_reduce, collectives.reduce_scatter):
        with World.init(), pytest.raises(WorldError, match="(?i)" + message):
            call(tensor, op)


TENSORS_REFUSED = [
    (lambda: [1.0], "takes a torch.Tensor, not list. For other values use the object forms"),
    (lambda: torch.eye(2).to_sparse(), "takes dense tensors, not layout torch.sparse_coo"),
    (lambda: torch.empty(2, device="meta"), "a tensor on the meta device holds no data"),
    (lambda: torch.zeros(1).expand(3), "this one is expanded"),
]


@pytest.mark.parametrize(("make", "message"), TENSORS_REFUSED)
def test_tensors_that_cannot_be_reduced_in_place_are_refused(make, message):
    with World.init(), pytest.raises(WorldError, match=message):
        collectives.all_reduce(make())


@pytest.mark.world(2)
def test_reduce_scatter_names_a_shape_it_cannot_cut(ranks):
    def job():
        for shape in [(3, 2), ()]:
            with pytest.raises(WorldError, match="cannot be cut into 2 equal slices"):
                collectives.reduce_scatter(torch.zeros(shape))
        collectives.barrier()  # still in step

    ranks(job)
