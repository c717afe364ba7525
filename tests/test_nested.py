"""Containers of every kind that users bring, taken apart and rebuilt."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.nested import leaves, map_leaves, map_tensors, named_leaves, tensors


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    logits: Any
    note: str = "n"
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = len(self.logits)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


class Labelled(list):
    label = "none"


class Numbered(tuple):
    """Takes its items one by one."""

    def __new__(cls, *items: Any) -> Numbered:
        return super().__new__(cls, items)


class FirstOnly(tuple):
    """Takes anything, and makes something else of it."""

    def __new__(cls, first: Any, *rest: Any) -> FirstOnly:
        return super().__new__(cls, (first,))


def _double(leaf: Any) -> Any:
    return leaf * 2 if isinstance(leaf, Tensor) else leaf


def _x(*values: float) -> Tensor:
    return torch.tensor(values)


def _labelled(*items: Any) -> Labelled:
    made = Labelled(items)
    made.label = "mine"
    return made


@pytest.mark.parametrize(
    "value",
    [
        (_x(1), "a", None),
        [_x(1), [_x(2)]],
        {"a": _x(1), "b": 3},
        Pair(_x(1), (_x(2),)),
        Output(_x(1, 2)),
        Frozen(_x(1), [_x(2)]),
        OrderedDict(a=_x(1), b=_x(2)),
        defaultdict(list, a=_x(1)),
        UserDict(a=_x(1)),
        _labelled(_x(1)),
        Numbered(_x(1), _x(2)),
        torch.max(torch.eye(3), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_keeps_its_class_and_its_items(value: Any) -> None:
    made = map_leaves(value, _double)
    assert type(made) is type(value)
    before, after = list(tensors(value)), list(tensors(made))
    assert before
    assert all(torch.equal(2 * a, b) for a, b in zip(before, after, strict=True))
    others = [leaf for leaf in leaves(value) if not isinstance(leaf, Tensor)]
    assert [leaf for leaf in leaves(made) if not isinstance(leaf, Tensor)] == others


def test_where_nothing_changes_the_container_is_the_same_object_unless_a_fresh_one_is_asked() -> (
    None
):
    value = {"a": [_x(1), Pair(_x(2), ("b",))], "c": Output(_x(3))}
    same = map_leaves(value, lambda leaf: leaf)
    assert same is value
    fresh = map_leaves(value, lambda leaf: leaf, fresh=True)
    assert fresh is not value
    assert fresh["a"] is not value["a"]
    assert fresh["a"][0] is value["a"][0]
    half = map_leaves((value, [_x(1)]), lambda leaf: leaf + 1 if leaf is half_of(value) else leaf)
    assert half[1][0].item() == 1


def half_of(value: Any) -> Any:
    return value["a"][0]


def test_what_a_subclass_carries_beside_its_items_is_kept() -> None:
    assert map_tensors(_labelled(_x(1)), _double).label == "mine"
    made = map_tensors(defaultdict(list, a=_x(1)), _double)
    assert made["new"] == []


def test_a_derived_field_of_a_dataclass_is_computed_anew() -> None:
    cut = map_tensors(Output(_x(1, 2, 3)), lambda t: t[:2])
    assert cut.size == 2
    assert list(leaves(cut))[1:] == ["n"]
    assert list(leaves(cut, every_field=True))[1:] == ["n", 2]


def test_a_field_that_was_never_set_counts_as_none() -> None:
    bare = Output.__new__(Output)
    assert list(leaves(bare)) == [None, "n"]


def test_a_tuple_that_cannot_hold_other_items_becomes_a_plain_one() -> None:
    assert map_leaves(torch.Size([1, 2]), str) == ("1", "2")
    assert map_leaves(FirstOnly(1, 2), str) == ("1",)
    size = torch.Size([1, 2])
    assert map_leaves(size, lambda leaf: leaf) is size


def test_a_mapping_that_cannot_be_written_becomes_a_dict() -> None:
    made = map_tensors(types.MappingProxyType({"a": _x(1)}), _double)
    assert type(made) is dict
    assert made["a"].item() == 2


def test_classes_and_strings_are_leaves() -> None:
    assert list(leaves((Output, "abc", b"d", range(2)))) == [Output, "abc", b"d", range(2)]


def test_a_leaf_of_ones_own() -> None:
    packed = pack_sequence([_x(1, 2), _x(3)])
    value = {"p": packed, "x": _x(1)}
    found = list(leaves(value, is_leaf=lambda v: isinstance(v, PackedSequence)))
    assert found[0] is packed
    assert isinstance(map_tensors(packed, lambda t: t.clone()), PackedSequence)


def test_leaves_with_where_they_are() -> None:
    value = {"a": [1, Pair(2, Frozen(3))]}
    assert dict(named_leaves(value, "batch")) == {
        "batch['a'][0]": 1,
        "batch['a'][1].first": 2,
        "batch['a'][1].second.x": 3,
        "batch['a'][1].second.y": None,
    }


def test_hugging_faces_outputs_and_batches() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.CausalLMOutput(loss=_x(1), logits=_x(2, 3))
    made = map_tensors(output, _double)
    assert type(made) is type(output)
    assert made.loss.item() == made["loss"].item() == 2
    assert made.hidden_states is None
    assert output.loss.item() == 1
    batch = transformers.BatchEncoding({"input_ids": torch.tensor([[1, 2]])})
    assert type(map_tensors(batch, _double)) is transformers.BatchEncoding
