"""A sampler that knows which samples were seen, and shares out the others anew."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from paceline.compat.horovod.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares the samples of a dataset among ranks; those already seen in an epoch are left out.

    Put it into a ``TorchState``, call ``record_batch`` (or ``record_indices``) after each batch,
    and ``set_epoch`` at the end of an epoch. The order depends on ``seed`` and the epoch alone.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        self.num_replicas = 0
        self.rank = 0
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its order is another, and none of its samples was seen."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has seen ``batch_size`` further samples."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note which samples this rank has seen, by their numbers in the dataset."""
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank."""
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": set(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was seen, and share out the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Share out what was not seen among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [
            index for index in order[self.processed_num :] if index not in self.processed_indices
        ]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's samples; the first ones come again where they do not go into equal parts."""
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        """How many samples this rank has left."""
        return self.num_samples
