from __future__ import annotations

import itertools
import math
import pathlib
import random
import uuid
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.state_cases import (
    DTYPES,
    load_simulated,
    memory,
    part_of,
    random_box,
    random_tensor,
    same_bits,
    save_simulated,
    spread,
)
from paceline.checkpoint.boxes import Box, whole
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import Manifest, Stored, TensorEntry
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.sharded import reader
from paceline.checkpoint.sharded.dcp_planner import StateSavePlanner, object_bytes
from paceline.checkpoint.sharded.load_plan import read_plan
from paceline.checkpoint.sharded.save_plan import BoxKey, RankOffer, shared_out
from paceline.errors import CheckpointError


def _given(*states: RankState, steps: tuple[int, ...] = ()) -> list[RankOffer]:
    steps = steps or (1,) * len(states)
    return [
        StateSavePlanner(step, state).create_local_plan().planner_data
        for step, state in zip(steps, states, strict=True)
    ]


def _shares(*states: RankState) -> list[list[BoxKey]]:
    """By rank: the boxes it writes."""
    given = _given(*states)
    shares, _ = shared_out(given)
    return [[own.boxes[i] for i in share] for own, share in zip(given, shares, strict=True)]


def _rows(name: str, shape: tuple[int, ...], *ranges: tuple[int, int]) -> RankState:
    boxes = [Box((a, *(0 for _ in shape[1:])), (b - a, *shape[1:])) for a, b in ranges]
    return RankState({name: part_of(torch.ones(shape), boxes)})


# Saved by any number of ranks in any boxes, loaded by any number in any boxes, to the bit.
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 24, 2**25]))
def test_any_cut_loads_into_any_other(seed: int, savers: int, loaders: int, window: int) -> None:
    draw = random.Random(seed)
    tensors = {f"t{i}": random_tensor(draw) for i in range(draw.randint(1, 4))}
    folder = Folder(f"memory://{uuid.uuid4().hex}")
    checkpoint = save_simulated(folder, 3, spread(tensors, savers, draw))
    assert not checkpoint.damages()
    _check_stored_once(checkpoint.manifest)
    with mock.patch.object(reader, "_WINDOW", window):
        for _ in range(loaders):
            parts = {}
            for name, tensor in tensors.items():
                boxes = [random_box(tensor.shape, draw) for _ in range(draw.randint(0, 3))]
                pieces = [Piece(box, memory(box.shape, tensor.dtype, draw)) for box in boxes]
                parts[name] = Part(tuple(tensor.shape), tensor.dtype, tuple(pieces))
            load_simulated(checkpoint, parts)
            for name, part in parts.items():
                for piece in part.pieces:
                    assert same_bits(piece.tensor, tensors[name][piece.box.slices()]), name
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.read_tensor(name), tensor)
    folder.storage.delete_folder("")


def _check_stored_once(manifest: Manifest) -> None:
    ends = dict.fromkeys(manifest.files, 0)
    places = sorted(
        (s.file, s.start, s.length) for entry in manifest.tensors.values() for s in entry.stored
    )
    for file, start, length in places:
        assert start % 64 == 0
        assert start >= ends[file]
        ends[file] = start + length
    for entry in manifest.tensors.values():
        assert sum(s.box.size for s in entry.stored) == math.prod(entry.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_where_it_cannot_be_read_in_place(dtype: torch.dtype) -> None:
    folder = Folder(f"memory://{uuid.uuid4().hex}")
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    checkpoint = save_simulated(folder, 1, [RankState({"t": whole_part(tensor)})])
    own = torch.zeros(6, 2).to(dtype).t()
    load_simulated(checkpoint, {"t": Part((4, 6), dtype, (Piece(Box((1, 0), (2, 6)), own),))})
    assert same_bits(own, tensor[1:3])


def test_each_replicated_box_is_written_once_and_bytes_are_balanced() -> None:
    state = RankState({f"t{n}": whole_part(torch.zeros(n)) for n in range(1, 41)})
    own = RankState({"own": whole_part(torch.zeros(100)), **state.tensors})
    written = _shares(own, state, state, state)
    assert sorted(key[0] for share in written for key in share) == sorted(own.tensors)
    sizes = [sum(key[2][0] for key in share) for share in written]
    assert max(sizes) - min(sizes) <= 10


def test_balance_counts_the_box_and_not_the_tensor_it_is_of() -> None:
    """torch's own planner takes a thousandth of a tensor for all of it."""
    big = (1000, 10)
    replicated = {f"r{i}": whole_part(torch.zeros(100)) for i in range(20)}
    states = []
    for rank in range(2):
        state = _rows("big", big, (0, 1) if rank == 0 else (1, 2))
        states.append(RankState({**state.tensors, **replicated}))
    states.append(_rows("big", big, (2, 1000)))
    written = _shares(*states)
    assert [len(share) for share in written] == [11, 11, 1]


def test_zero_dimensional_tensors_and_objects() -> None:
    """Objects stay where they are; their bytes count."""
    state = RankState({"step": whole_part(torch.tensor(5.0))})
    with_object = RankState(dict(state.tensors), {"loop": {"epoch": 1}})
    assert _shares(with_object, state) == [[], [("step", (), ())]]


def test_an_object_given_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"object 'loop' is given by rank 0 and by rank 2"):
        _shares(RankState({}, {"loop": 1}), RankState(), RankState({}, {"loop": 1}))


def test_boxes_that_begin_at_one_place_are_not_taken_for_equal() -> None:
    """torch's own planner drops one of them, with the elements that only it holds."""
    with pytest.raises(CheckpointError, match=r"'w': the box \[0:2, 0:2\] of rank 0 and the box "):
        _shares(_rows("w", (4, 2), (0, 2)), _rows("w", (4, 2), (0, 4)))


@pytest.mark.parametrize(
    ("first", "second"), [((0, 3), (2, 4)), ((2, 4), (0, 3)), ((0, 4), (1, 2))]
)
def test_overlapping_boxes_are_refused(first: tuple[int, int], second: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="overlap without being equal"):
        _shares(_rows("w", (4, 2), first), _rows("w", (4, 2), second))


def test_one_rank_may_not_contradict_itself() -> None:
    with pytest.raises(CheckpointError, match=r"of rank 0 and the box .* of rank 0 overlap"):
        _shares(_rows("w", (4, 2), (0, 3), (1, 4)))


def test_elements_that_no_rank_gives_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'w' of shape \(4, 2\).* 6 of its 8 elements"):
        _shares(_rows("w", (4, 2), (0, 2)), _rows("w", (4, 2), (3, 4)))
    nothing = RankState({"w": Part((4,), torch.float32, ())})
    with pytest.raises(CheckpointError, match="0 of its 4 elements"):
        _shares(nothing, nothing)


def test_an_empty_tensor_is_saved_though_there_is_nothing_to_write() -> None:
    given = _given(RankState({"e": Part((0, 3), torch.int8, ())}))
    assert shared_out(given) == ([[]], {"e": ((0, 3), torch.int8)})


def test_ranks_must_agree_on_shape_dtype_and_step() -> None:
    one = RankState({"w": whole_part(torch.zeros(4))})
    other = RankState({"w": whole_part(torch.zeros(5))})
    with pytest.raises(CheckpointError, match=r"'w' is .*\(4,\) on rank 0 and .*\(5,\) on rank 1"):
        _shares(one, other)
    half = RankState({"w": Part((4,), torch.float16, ())})
    with pytest.raises(CheckpointError, match=r"float32 .*rank 0 and torch.float16"):
        _shares(one, half)
    with pytest.raises(CheckpointError, match="rank 0 saves step 1 and rank 1 step 2"):
        shared_out(_given(one, one, steps=(1, 2)))


@pytest.mark.parametrize(
    ("shape", "dtype", "piece", "problem"),
    [
        ((4,), torch.float32, Piece(Box((2,), (3,)), torch.zeros(3)), r"\[2:5\] does not lie in"),
        ((4,), torch.float32, Piece(Box((-1,), (3,)), torch.zeros(3)), "does not lie in"),
        ((4,), torch.float32, Piece(Box((0, 0), (2, 2)), torch.zeros(2, 2)), "does not lie in"),
        ((4,), torch.float32, Piece(whole((4,)), torch.zeros(3)), r"a tensor of shape \(3,\)"),
        ((4,), torch.float16, Piece(whole((4,)), torch.zeros(4)), "float16, .* torch.float32"),
        ((4,), torch.float32, Piece(whole((4,)), torch.zeros(4, device="meta")), "meta device"),
        ((4,), torch.float32, Piece(whole((4,)), torch.zeros(4).to_sparse()), "sparse"),
    ],
)
def test_pieces_that_are_not_what_they_say(
    shape: tuple[int, ...], dtype: torch.dtype, piece: Piece, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=f"tensor 'w': .*{problem}"):
        _given(RankState({"w": Part(shape, dtype, (piece,))}))


class Thing:
    pass


@pytest.mark.parametrize("value", [Thing(), pathlib.PurePosixPath("a"), {"a": [print]}])
def test_objects_that_need_code_to_load_are_refused_at_once(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"'mine' holds .* without executing code"):
        object_bytes("mine", value)


def test_objects_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(CheckpointError, match="'mine' cannot be saved"):
        object_bytes("mine", (n for n in range(3)))


def _manifest(shape: tuple[int, ...], *boxes: Box) -> Manifest:
    stored = tuple(Stored(box, "f", 0, box.size * 4) for box in boxes)
    return Manifest(5, tensors={"w": TensorEntry(shape, "float32", stored)})


def test_read_plan_names_what_a_checkpoint_lacks() -> None:
    manifest = _manifest((4, 2), Box((0, 0), (2, 2)))
    want = {"w": whole_part(torch.zeros(4, 2))}
    with pytest.raises(
        CheckpointError, match=r"'w': of the 8 elements of the box \[0:4, 0:2\] .* 4"
    ):
        read_plan(want, manifest)
    many = {f"v{i}": want["w"] for i in range(8)}
    with pytest.raises(CheckpointError, match=r"step 5 holds no tensor 'v0', .*'v4' and 3 more"):
        read_plan(many, manifest)


def test_read_plan_refuses_another_shape_or_dtype() -> None:
    manifest = _manifest((4,), whole((4,)))
    with pytest.raises(CheckpointError, match=r"shape \(4,\) in the checkpoint and \(5,\) here"):
        read_plan({"w": whole_part(torch.zeros(5))}, manifest)
    with pytest.raises(CheckpointError, match=r"float32 in the checkpoint and torch.float16 here"):
        read_plan({"w": whole_part(torch.zeros(4, dtype=torch.float16))}, manifest)


def test_read_plan_asks_only_for_what_it_needs() -> None:
    rows = [Box((i, 0), (1, 3)) for i in range(6)]
    part = part_of(torch.zeros(6, 3), [Box((2, 1), (2, 1))])
    items = read_plan({"w": part}, _manifest((6, 3), *rows))
    assert [tuple(item.storage_index.offset) for item in items] == [(2, 0), (3, 0)]
    assert {tuple(item.lengths) for item in items} == {(1, 1)}
    assert not read_plan({"w": part_of(torch.zeros(6, 3), [])}, _manifest((6, 3), *rows))


def test_windows_are_stretches_that_fill_the_box() -> None:
    for shape, limit in itertools.product([(), (7,), (3, 5), (2, 1, 4), (5, 2, 3)], [1, 2, 5, 99]):
        seen = torch.zeros(shape, dtype=torch.int)
        for window in reader._windows(shape, limit):
            assert window.size <= limit
            assert reader._is_run(window, whole(shape))
            seen[window.slices()] += 1
        assert bool((seen == 1).all())
