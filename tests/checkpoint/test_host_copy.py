from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch

from checkpoint.state_cases import DTYPES, part_of, random_tensor, same_bits, spread
from paceline.checkpoint.boxes import whole
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.sharded import host_copy as snapshots
from paceline.checkpoint.sharded.host_copy import HostCopy
from paceline.errors import CheckpointError


def test_the_copy_does_not_change_with_the_state() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    counter = torch.tensor(3)
    loop: dict[str, Any] = {"epoch": 1, "order": [1, 2], "random": torch.arange(3)}
    state = RankState(
        {
            "w": Part((2, 3), torch.float32, (Piece(whole((2, 3)), parameter),)),
            "n": whole_part(counter),
        },
        {"loop": loop},
    )
    taken = HostCopy().take(state)
    with torch.no_grad():
        parameter.zero_()
    counter += 1
    loop["order"].append(3)
    loop["random"] += 1
    state.tensors.clear()
    assert torch.equal(taken.tensors["w"].pieces[0].tensor, torch.arange(6.0).reshape(2, 3))
    assert taken.tensors["n"].pieces[0].tensor.item() == 3
    assert taken.objects["loop"]["order"] == [1, 2]
    assert torch.equal(taken.objects["loop"]["random"], torch.arange(3))


def test_any_boxes_dtypes_and_strides() -> None:
    draw = random.Random(5)
    tensors = {f"t{i}": random_tensor(draw) for i in range(40)}
    tensors |= {str(dtype): torch.ones(3, 5).to(dtype) for dtype in DTYPES}
    snapshot = HostCopy()
    for state in spread(tensors, 3, draw):
        taken = snapshot.take(state)
        assert list(taken.tensors) == list(state.tensors)
        for name, part in state.tensors.items():
            copy = taken.tensors[name]
            assert (copy.shape, copy.dtype) == (part.shape, part.dtype)
            assert [piece.box for piece in copy.pieces] == [piece.box for piece in part.pieces]
            for mine, theirs in zip(copy.pieces, part.pieces, strict=True):
                assert same_bits(mine.tensor, theirs.tensor)
                assert mine.tensor.is_contiguous()


def test_one_buffer_serves_all_and_grows_when_it_must() -> None:
    snapshot = HostCopy()
    snapshot.reserve(RankState({"w": whole_part(torch.ones(1000))}))
    reserved = snapshot.size
    assert 4000 <= reserved < 4064

    def address(count: int) -> int:
        taken = snapshot.take(RankState({"w": whole_part(torch.ones(count))}))
        return taken.tensors["w"].pieces[0].tensor.data_ptr()

    assert address(1000) == address(10) == address(1000)
    assert snapshot.size == reserved
    address(2000)
    assert 8000 <= snapshot.size < 8064
    address(10)
    assert 8000 <= snapshot.size < 8064
    snapshot.free()
    assert snapshot.size == 0


def test_a_state_that_changed_its_shape_is_laid_out_anew() -> None:
    snapshot = HostCopy()
    first, second = torch.ones(6), torch.full((2, 3), 2.0)
    for _ in range(2):
        first += 1
        second += 1
        for tensors in ({"a": first}, {"a": second}, {"a": second, "b": first}, {"b": first[:4]}):
            state = RankState({name: whole_part(tensor) for name, tensor in tensors.items()})
            taken = snapshot.take(state)
            assert list(taken.tensors) == list(tensors)
            for name, tensor in tensors.items():
                assert same_bits(taken.tensors[name].pieces[0].tensor, tensor)


@pytest.mark.parametrize(
    "bad", [torch.zeros(4, dtype=torch.int32), torch.zeros(4).to_sparse(), torch.zeros(5)]
)
def test_a_piece_that_is_not_what_it_says_is_refused_later_on_too(bad: torch.Tensor) -> None:
    snapshot = HostCopy()
    for tensor in (torch.ones(4), torch.ones(4)):
        snapshot.take(RankState({"w": whole_part(tensor)}))
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        snapshot.take(RankState({"w": Part((4,), torch.float32, (Piece(whole((4,)), bad),))}))
    taken = snapshot.take(RankState({"w": whole_part(torch.full((4,), 3.0))}))
    assert same_bits(taken.tensors["w"].pieces[0].tensor, torch.full((4,), 3.0))


def test_a_buffer_is_let_go_of_before_a_larger_one_is_made() -> None:
    snapshot = HostCopy()
    snapshot.reserve(RankState({"w": whole_part(torch.ones(1000))}))
    old = weakref.ref(snapshot._buffer)
    snapshot.reserve(RankState({"w": whole_part(torch.ones(2000))}))
    assert old() is None


def test_no_memory_is_said_with_the_size() -> None:
    huge = torch.empty(1).expand(2**50)
    with pytest.raises(CheckpointError, match=rf"no memory for a copy of the state: {2**52} bytes"):
        HostCopy().take(RankState({"w": whole_part(huge)}))


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(CheckpointError, match="object 'mine' cannot be copied: TypeError"):
        HostCopy().take(RankState({}, {"mine": (n for n in range(3))}))
    wrong = Part((4,), torch.float32, (Piece(whole((4,)), torch.zeros(3)),))
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        HostCopy().take(RankState({"w": wrong}))


def test_an_empty_state() -> None:
    taken = HostCopy().take(RankState({"e": part_of(torch.empty(0, 2), [])}))
    assert taken.tensors["e"].pieces == ()


class FakeRuntime:
    """Stands in for CUDA's runtime: which memory is registered, and may it be."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.allowed:
            self.registered[address] = size
        return 0 if self.allowed else 2

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("how", ["freed", "grown", "forgotten", "refused"])
def test_pinned_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    runtime = FakeRuntime(allowed=how != "refused")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(snapshots, "_on_cuda", lambda state: True)
    forgotten: list[str] = []
    monkeypatch.setattr(snapshots, "_forget_refusal", lambda: forgotten.append("refusal"))
    snapshot = HostCopy()
    snapshot.reserve(RankState({"w": whole_part(torch.ones(100))}))
    assert snapshot.pinned == (how != "refused")
    assert forgotten == (["refusal"] if how == "refused" else [])
    assert list(runtime.registered.values()) == ([448] if snapshot.pinned else [])
    if how == "grown":
        snapshot.reserve(RankState({"w": whole_part(torch.ones(200))}))
        assert list(runtime.registered.values()) == [832]
    if how == "forgotten":
        del snapshot
    else:
        snapshot.free()
        assert not snapshot.pinned
    assert not runtime.registered
