"""What differs between two checkpoints, value by value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.diff import bytes_to_read, compare, diff_checkpoints
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.errors import CheckpointError


def saved(
    where: Path, tensors: dict[str, Tensor], objects: dict[str, Any] | None = None, step: int = 1
) -> Checkpoint:
    parts = {name: whole_part(tensor) for name, tensor in tensors.items()}
    return save(Folder(where), step, RankState(parts, objects or {}), info={}, group=None)


def test_equal_to_the_bit_whatever_the_step_and_the_pieces(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    whole = saved(tmp_path / "a", {"model/w": weight}, {"loop": {"best": math.nan}})
    halves = tuple(
        Piece(Box((0, column), (6, 2)), weight[:, column : column + 2]) for column in (0, 2)
    )
    state = RankState(
        {"model/w": Part((6, 4), torch.float32, halves)}, {"loop": {"best": math.nan}}
    )
    cut = save(Folder(tmp_path / "b"), 9, state, info={"layout": "tp=2"}, group=None)
    found = diff_checkpoints(whole, cut)
    assert found.equal
    assert (found.equal_tensors, found.equal_objects) == (1, 1)


def test_every_kind_of_difference_the_largest_first(tmp_path: Path) -> None:
    same = torch.randn(3)
    a = {"same": same, "gone": torch.ones(2), "shape": torch.ones(2, 3), "kind": torch.ones(2)}
    b = {
        "same": same,
        "new": torch.ones(2),
        "shape": torch.ones(6),
        "kind": torch.ones(2).bfloat16(),
    }
    a |= {"little": torch.tensor([1.0, 2.0]), "lot": torch.tensor([1.0, 2.0])}
    b |= {"little": torch.tensor([1.0, 2.5]), "lot": torch.tensor([5.0, -2.0])}
    found = diff_checkpoints(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    kinds = [(one.name, one.kind) for one in found.tensors]
    assert kinds == [
        ("gone", "only in A"),
        ("new", "only in B"),
        ("shape", "shape"),
        ("kind", "dtype"),
        ("lot", "values"),
        ("little", "values"),
    ]
    by_name = {one.name: one for one in found.tensors}
    assert (by_name["shape"].a, by_name["shape"].b) == ("float32 [2, 3]", "float32 [6]")
    assert (by_name["kind"].elements, by_name["kind"].absolute) == (0, 0.0)
    assert (by_name["lot"].elements, by_name["lot"].absolute) == (2, 4.0)
    assert (by_name["little"].elements, by_name["little"].relative) == (1, 0.2)
    assert found.equal_tensors == 1


def test_objects_are_compared_value_by_value(tmp_path: Path) -> None:
    a = {"loop": {"step": 1, "best": 0.5, "list": [1, 2], "t": torch.zeros(9)}, "only": 3}
    b = {"loop": {"step": 1.0, "best": 0.5, "list": [1, 3], "t": torch.ones(9), "more": None}}
    found = diff_checkpoints(saved(tmp_path / "a", {}, a), saved(tmp_path / "b", {}, b))
    assert {one.name: (one.a, one.b) for one in found.objects} == {
        "loop/step": ("1", "1.0"),
        "loop/list/1": ("2", "3"),
        "loop/t": ("float32 [9]", "float32 [9]"),
        "loop/more": ("", "None"),
        "only": ("3", ""),
    }


def test_seconds_are_told_and_not_counted(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {}, {"loop": {"epoch_seconds": 0.46, "best": 0.5}})
    b = saved(tmp_path / "b", {}, {"loop": {"epoch_seconds": 0.85, "best": 0.5}})
    found = diff_checkpoints(a, b)
    assert found.equal
    assert (found.objects, found.equal_objects) == ([], 1)
    assert [(one.name, one.a, one.b) for one in found.clocks] == [
        ("loop/epoch_seconds", "0.46", "0.85")
    ]
    c = saved(tmp_path / "c", {}, {"loop": {"epoch_seconds": 0.46, "best": 0.4}})
    assert not diff_checkpoints(b, c).equal


def test_only_what_matches(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"model/w": torch.ones(2), "optimizer/w": torch.ones(2)}, {"o": 1})
    b = saved(tmp_path / "b", {"model/w": torch.ones(2), "optimizer/w": torch.zeros(2)}, {"o": 2})
    read: list[int] = []
    assert diff_checkpoints(a, b, only=["model/*"], progress=read.append).equal
    assert sum(read) == bytes_to_read(a, b, ["model/*"]) == 16
    assert not diff_checkpoints(a, b).equal


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], (0, 0.0, 0.0)),
        ([math.nan], [1.0], (1, math.inf, math.inf)),
        ([math.inf, 0.0], [math.inf, 3.0], (1, 3.0, 1.0)),
        ([math.inf], [-math.inf], (1, math.inf, math.inf)),
        ([0.0], [-0.0], (1, 0.0, 0.0)),
    ],
    ids=["same NaN", "NaN", "same inf", "inf", "zeros"],
)
def test_what_is_no_usual_number(
    a: list[float], b: list[float], expected: tuple[int, float, float]
) -> None:
    assert compare(torch.tensor(a), torch.tensor(b)) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_large_whole_numbers_that_differ_by_one(dtype: torch.dtype) -> None:
    a, b = torch.tensor([2**60, 7]).to(dtype), torch.tensor([2**60 + 1, 7]).to(dtype)
    elements, absolute, relative = compare(a, b)
    assert (elements, absolute) == (1, 1.0)
    assert relative == pytest.approx(2**-60)


@pytest.mark.parametrize(
    ("dtype", "absolute"),
    [
        (torch.bool, 1.0),
        (torch.uint8, 1.0),
        (torch.bfloat16, 1.0),
        (torch.float8_e4m3fn, 1.0),
        (torch.complex64, 1.0),
    ],
    ids=str,
)
def test_any_dtype(dtype: torch.dtype, absolute: float) -> None:
    a, b = torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1, 1, 1]).to(dtype)
    assert compare(a, b) == (1, absolute, 1.0)
    assert compare(a, a.clone())[0] == 0


def test_more_elements_than_are_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.diff._CHUNK", 7)
    a = torch.arange(100.0)
    b = a.clone()
    b[[3, 50, 99]] += torch.tensor([1.0, 2.0, 3.0])
    assert compare(a, b)[:2] == (3, 3.0)
    assert compare(torch.tensor(1.0), torch.tensor(2.0))[0] == 1
    assert compare(torch.empty(0), torch.empty(0)) == (0, 0.0, 0.0)


def test_damage_is_no_difference_but_an_error(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": torch.ones(100)})
    b = saved(tmp_path / "b", {"w": torch.ones(100)})
    (file,) = Path(b.path).glob("*.bin")
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: block at byte 0"):
        diff_checkpoints(a, b)
