"""Making a loader out of what the user has: a dataset, a stream or a torch DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, default_collate

from paceline.data.batch_shares import BatchCut
from paceline.data.checks import check_flags, check_seed, check_sharded, check_workers
from paceline.data.choose_source import given_share, is_stream, source_of
from paceline.data.loader import Loader, Sharing
from paceline.data.sample_source import Collate, Fetching
from paceline.data.torch_dataloader import from_dataloader
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes


def loader(
    dataset: Any,
    *,
    global_batch: int | None = None,
    per_device_batch: int | None = None,
    accumulate: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    workers: int | None = None,
    pin_memory: bool | None = None,
    collate_fn: Collate | None = None,
    rank: int | None = None,
    size: int | None = None,
    layout: str | Layout | None = None,
    sharded_by_rank: bool = False,
    compare: bool = True,
) -> Loader:
    """A loader over ``dataset`` that gives each rank its share of each ``global_batch`` samples.

    ``dataset`` is anything with ``__len__`` and ``__getitem__`` (a Dataset, a list, a tensor), an
    IterableDataset, or a torch DataLoader (then see :func:`from_dataloader`).

    - ``per_device_batch``, ``accumulate``: instead of ``global_batch``, which they make up:
      ``per_device_batch × data-parallel ranks × accumulate``. See :attr:`Loader.microbatch`.
    - ``shuffle``: a new order each epoch, by ``seed``; on unless switched off. Streams keep theirs.
    - ``drop_last``: leave out a last batch that is short of ``global_batch``; it is kept unless
      asked for.
    - ``workers``: processes that fetch ahead; 0 fetches in this one.
    - ``pin_memory``: by default where this rank's device is a GPU.
    - ``collate_fn``: makes a batch of a list of samples; torch's ``default_collate`` by default.
    - ``layout``: ranks that a layout puts on the same samples (``tp``, ``pp``) get the same: give
      ``engine.layout``. A ``Trainer`` or ``prepare`` that reads the loader gives its own; else each
      rank of the world gets a share.
    - ``rank``, ``size``: instead of a layout, which of how many shares this process gets.
    - ``sharded_by_rank``: the stream gives each data-parallel rank samples of its own, and a step
      takes each rank's share from its own stream.
    - ``compare``: ranks compare what they read, and raise where it is not the same data.
    """
    check_flags(
        shuffle=shuffle,
        drop_last=drop_last,
        pin_memory=pin_memory,
        sharded_by_rank=sharded_by_rank,
        compare=compare,
    )
    if isinstance(dataset, DataLoader):
        return from_dataloader(
            dataset,
            global_batch=global_batch,
            per_device_batch=per_device_batch,
            accumulate=accumulate,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            rank=rank,
            size=size,
            layout=layout,
            sharded_by_rank=sharded_by_rank,
            compare=compare,
        )
    sizes = BatchSizes(global_batch, per_device_batch, accumulate)
    if not sizes.says_global:
        raise DataError(
            "global_batch is missing: say how many samples one step takes, like 64, or give "
            "per_device_batch, those that one rank puts through the model at once."
        )
    if collate_fn is not None and not callable(collate_fn):
        raise DataError(
            f"collate_fn={collate_fn!r} must be a function that makes a batch of a list of samples."
        )
    workers = check_workers(0 if workers is None else workers)
    seed = check_seed(seed)
    streamed = is_stream(dataset)
    fixed, layout = given_share(rank, size, layout)
    cut = BatchCut(global_batch or 1, bool(drop_last))
    fetching = Fetching(workers, pin_memory, collate_fn or default_collate)
    source = source_of(dataset, streamed, cut, fetching, seed, shuffle, sharded_by_rank)
    check_sharded(sharded_by_rank, fixed, cut.drop_last)
    return Loader(source, sizes, Sharing(cut.drop_last, fixed, layout, compare))
