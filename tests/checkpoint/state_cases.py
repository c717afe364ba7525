"""States cut into boxes at random, and saves by many ranks in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box, whole
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import Part, Piece, RankState
from paceline.checkpoint.sharded.dcp_planner import PartsLoadPlanner, StateSavePlanner
from paceline.checkpoint.sharded.reader import PartsReader
from paceline.checkpoint.sharded.writer import StateWriter

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def random_tensor(draw: random.Random) -> Tensor:
    """Of any dtype, of up to three dimensions, some of them empty; any bit pattern."""
    dtype = draw.choice(DTYPES)
    shape = [draw.choice([0, 1, 2, 3, 5, 7, 8]) for _ in range(draw.randint(0, 3))]
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    values = torch.tensor([draw.randrange(top) for _ in range(count)], dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


def random_cut(box: Box, draw: random.Random, depth: int = 3) -> list[Box]:
    """Boxes that together are ``box``, once."""
    along = [d for d, length in enumerate(box.shape) if length > 1]
    if depth == 0 or not along or draw.random() < 0.25:
        return [box]
    d = draw.choice(along)
    at = draw.randrange(1, box.shape[d])
    left = Box(box.offset, _with(box.shape, d, at))
    right = Box(_with(box.offset, d, box.offset[d] + at), _with(box.shape, d, box.shape[d] - at))
    return random_cut(left, draw, depth - 1) + random_cut(right, draw, depth - 1)


def random_box(shape: Sequence[int], draw: random.Random) -> Box:
    """Any box of a tensor, empty ones included."""
    ends = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def memory(shape: Sequence[int], dtype: torch.dtype, draw: random.Random) -> Tensor:
    """Zeros of this shape, laid out in one of several ways."""
    kind = draw.choice(["dense", "columns", "strided", "offset"]) if shape else "dense"
    if kind == "columns":
        return torch.zeros(tuple(reversed(shape)), dtype=dtype).permute(
            *reversed(range(len(shape)))
        )
    if kind == "strided":
        return torch.zeros((*shape[:-1], shape[-1] * 2), dtype=dtype)[..., ::2]
    if kind == "offset":
        return torch.zeros((shape[0] + 1, *shape[1:]), dtype=dtype)[1:]
    return torch.zeros(tuple(shape), dtype=dtype)


def part_of(tensor: Tensor, boxes: Sequence[Box], draw: random.Random | None = None) -> Part:
    """A rank's part of ``tensor``: copies of some boxes of it."""
    draw = draw or random.Random(0)
    pieces = []
    for box in boxes:
        own = memory(box.shape, tensor.dtype, draw)
        own.copy_(tensor[box.slices()])
        pieces.append(Piece(box, own))
    return Part(tuple(tensor.shape), tensor.dtype, tuple(pieces))


def spread(tensors: dict[str, Tensor], ranks: int, draw: random.Random) -> list[RankState]:
    """The tensors cut at random over ranks, some boxes on several of them."""
    states = [RankState() for _ in range(ranks)]
    for name, tensor in tensors.items():
        held: list[list[Box]] = [[] for _ in range(ranks)]
        for box in random_cut(whole(tuple(tensor.shape)), draw):
            for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
                held[rank].append(box)
        for state, boxes in zip(states, held, strict=True):
            if boxes or draw.random() < 0.5:  # a rank may know of a tensor and hold nothing of it
                state.tensors[name] = part_of(tensor, boxes, draw)
    return states


def save_simulated(folder: Folder, step: int, states: Sequence[RankState]) -> Checkpoint:
    """What dcp.save has each rank do, one rank after the other."""
    checkpoint = folder.get(step)
    planners = [StateSavePlanner(step, state) for state in states]
    writers = [StateWriter(checkpoint, step, {}, read_back=True) for _ in states]
    plans, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(metadata, results)
    return checkpoint


def load_simulated(checkpoint: Checkpoint, parts: dict[str, Part]) -> None:
    """What dcp.load has one rank do."""
    planner = PartsLoadPlanner(checkpoint, parts)
    plan = planner.finish_plan(planner.create_local_plan())
    PartsReader(checkpoint).read_data(plan, planner).wait()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN or not."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bytes_of(a) == bytes_of(b)


def bytes_of(tensor: Tensor) -> bytes:
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
