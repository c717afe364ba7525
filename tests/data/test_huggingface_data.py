"""Hugging Face datasets: with a length, streaming with their own state, and in shards."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from paceline.data import loader, shards

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROWS = [{"id": number, "text": f"row {number}"} for number in range(53)]


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def test_map_style_streaming_and_shards_give_every_row_once() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    assert sorted(ids(loader(rows, global_batch=8, rank=0, size=1))) == list(range(53))

    stream = rows.to_iterable_dataset(num_shards=5)
    data = loader(stream, global_batch=8, rank=0, size=1)
    batches = iter(data)
    start = ids([next(batches), next(batches)])
    state = data.state_dict()
    batches.close()
    again = loader(stream, global_batch=5, rank=0, size=1)
    again.load_state_dict(state)
    assert start + ids(again) == list(range(53))

    dataset = shards(stream)
    assert sum(dataset.counts) == 53
    assert len(dataset.counts) == 5
    alone = ids(loader(dataset, global_batch=8, rank=0, size=1))
    assert sorted(alone) == list(range(53))
    pair = []
    for rank in range(2):
        with loader(dataset, global_batch=8, workers=2, rank=rank, size=2) as data:
            pair.append(list(data))
    assert ids(part for parts in zip(*pair, strict=True) for part in parts) == alone
