"""Datasets of Hugging Face: samples whose columns are Python lists are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import default_collate

from paceline.data.sample_source import Collate
from paceline.errors import DataError


def collate_of(dataset: Any, collate_fn: Collate | None) -> Collate:
    """What makes batches of the samples of ``dataset``: ``collate_fn``, or torch's by default."""
    own = collate_fn not in (None, default_collate)
    if not own and type(dataset).__module__.partition(".")[0] == "datasets":
        return collate_tensors
    return collate_fn or default_collate


def collate_tensors(samples: list[Any]) -> Any:
    """Torch's ``default_collate``; ``DataError`` where a column of a sample is a list of numbers.

    Of such a list torch makes one tensor for each of its places, with the samples of the batch in
    it: columns where rows are meant.
    """
    for sample in samples:
        for name, value in sample.items() if isinstance(sample, Mapping) else ():
            if isinstance(value, list) and value and isinstance(value[0], int | float | list):
                raise DataError(
                    f"the column {name!r} of the Hugging Face dataset is a Python list in each "
                    'sample, not a tensor. Pass dataset.with_format("torch"), or a collate_fn that '
                    "makes tensors of the samples, such as DataCollatorWithPadding."
                )
    return default_collate(samples)
