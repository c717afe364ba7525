"""Empty batches, and slices of ready ones, for every structure a batch may have."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding

from paceline.data import loader
from paceline.data.batch_slicing import count_rows, cut_rows, empty_batch
from paceline.errors import DataError


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str = "kept"


def shapes(batch: Any) -> Any:
    """The structure with tensors and arrays replaced by their shapes."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return tuple(batch.shape)
    if isinstance(batch, dict | BatchEncoding):
        return {key: shapes(value) for key, value in batch.items()}
    if isinstance(batch, Pair):
        return Pair(shapes(batch.x), shapes(batch.y))
    if isinstance(batch, list | tuple):
        return type(batch)(shapes(value) for value in batch)
    return batch


def repeat(sample: Any, collate: Any = default_collate) -> Any:
    return empty_batch(lambda count: collate([sample] * count))


SAMPLE = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (SAMPLE, (0, 2, 3)),
        (7, (0,)),
        ((SAMPLE, 1), [(0, 2, 3), (0,)]),
        ([SAMPLE, [SAMPLE, 2.5]], [(0, 2, 3), [(0, 2, 3), (0,)]]),
        (Pair(SAMPLE, {"a": 1}), Pair((0, 2, 3), {"a": (0,)})),
        (
            {"x": SAMPLE, "name": "text", "both": ("a", "b")},
            {"x": (0, 2, 3), "name": [], "both": [(), ()]},
        ),
        (np.zeros(4), (0, 4)),
    ],
)
def test_default_collate_shrinks_to_nothing(sample: Any, expected: Any) -> None:
    assert shapes(repeat(sample)) == expected


def test_collate_functions_of_many_kinds() -> None:
    time_first = repeat(SAMPLE, lambda samples: torch.stack(samples, dim=1))
    assert time_first.shape == (2, 0, 3)
    packed = repeat(SAMPLE, torch.cat)
    assert packed.shape == (0, 3)
    assert repeat(SAMPLE, list) == []
    assert repeat(SAMPLE, tuple) == ()
    array = repeat(SAMPLE, lambda samples: np.stack([s.numpy() for s in samples]))
    assert array.shape == (0, 2, 3)
    record = repeat(SAMPLE, lambda samples: Record(torch.stack(samples)))
    assert (record.x.shape, record.name) == ((0, 2, 3), "kept")


def test_counts_and_sums_come_to_zero_and_means_stay() -> None:
    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        return {
            "x": torch.stack(samples),
            "tokens": 6 * len(samples),
            "total": torch.tensor(6 * len(samples)),
            "mean": 0.5,
            "mask": None,
            "scale": torch.tensor(2.0),
        }

    batch = repeat(SAMPLE, collate)
    assert batch.pop("x").shape == (0, 2, 3)
    assert {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in batch.items()} == {
        "tokens": 0,
        "total": 0,
        "mean": 0.5,
        "mask": None,
        "scale": 2.0,
    }


def test_hugging_face_encodings_keep_their_type() -> None:
    def collate(samples: list[torch.Tensor]) -> BatchEncoding:
        return BatchEncoding({"input_ids": torch.stack(samples), "labels": torch.stack(samples)})

    batches = [
        next(iter(loader([SAMPLE] * 5, global_batch=1, collate_fn=collate, rank=rank, size=2)))
        for rank in range(2)
    ]
    assert all(type(batch) is BatchEncoding for batch in batches)
    assert shapes(batches[0]) == {"input_ids": (1, 2, 3), "labels": (1, 2, 3)}
    assert shapes(batches[1]) == {"input_ids": (0, 2, 3), "labels": (0, 2, 3)}
    assert batches[1].input_ids.shape == (0, 2, 3)


def test_a_collate_function_may_take_its_samples_apart() -> None:
    """Hugging Face collators pop entries: each call must get samples of its own."""

    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"x": index, "label": index}

    def collate(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        labels = [sample.pop("label") for sample in samples]
        return {"labels": torch.tensor(labels), "x": torch.tensor([s["x"] for s in samples])}

    data = loader(Rows(), global_batch=1, collate_fn=collate, rank=1, size=2)
    assert [shapes(batch) for batch in data] == [{"labels": (0,), "x": (0,)}] * 3


class Opaque:
    pass


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            lambda samples: torch.zeros(3),
            "collate_fn gave the same Tensor for one sample and for two, so a rank without samples "
            "cannot be given an empty batch. Let collate_fn return tensors with a dimension that "
            "counts samples, or set global_batch to at least the number of ranks.",
        ),
        (
            lambda samples: {"x": Opaque()},
            f"the batch['x'] is a {Opaque.__module__}.Opaque: Paceline cannot cut that into "
            "shares. Use tensors, tuples, lists, dicts or dataclasses of them, or set global_batch "
            "to at least the number of ranks.",
        ),
        (
            lambda samples: samples[0] if len(samples) == 1 else samples,
            "the batch is Tensor or list: Paceline cannot cut that into shares. Use tensors, "
            "tuples, lists, dicts or dataclasses of them, or set global_batch to at least the "
            "number of ranks.",
        ),
    ],
)
def test_batches_that_cannot_be_emptied(collate: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        repeat(SAMPLE, collate)
    assert str(caught.value) == message


def test_ready_batches_are_cut_by_rows() -> None:
    batch = {
        "x": torch.arange(10).view(5, 2),
        "pair": (torch.arange(5), np.arange(5)),
        "names": ["a", "b", "c", "d", "e"],
        "scale": torch.tensor(2.0),
        "split": "train",
    }
    assert count_rows(batch) == 5
    part = cut_rows(batch, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert [p.tolist() for p in part["pair"]] == [[1, 2], [1, 2]]
    assert (part["names"], part["scale"].item(), part["split"]) == (["b", "c"], 2.0, "train")
    assert cut_rows(batch, 5, 5)["x"].shape == (0, 2)
    assert cut_rows(["a", "b", "c"], 1, 3) == ["b", "c"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.zeros(4, 2), "y": torch.zeros(3)},
            "the batch['y'] has 3 as its first dimension where other parts have 4, so the batch "
            "cannot be cut into shares. Give the DataLoader a batch_size and let its dataset "
            "return single samples.",
        ),
        (
            {"name": "text"},
            "the DataLoader has batch_size=None and gave a dict without a tensor in it, so "
            "Paceline cannot tell its samples apart. Give the DataLoader a batch_size.",
        ),
    ],
)
def test_ready_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        cut_rows(batch, 0, 1)
    assert str(caught.value) == message
