"""Making a loader out of what the user has: a dataset, a stream or a torch DataLoader."""

from __future__ import annotations

from typing import Any, Never

from torch.utils.data import DataLoader

from paceline.data.arguments import LoaderArguments, check_seed, check_sharded, check_workers
from paceline.data.batch_shares import BatchCut
from paceline.data.choose_source import given_share, is_stream, source_of
from paceline.data.huggingface import collate_of
from paceline.data.loader import Loader, Sharing
from paceline.data.sample_source import Collate, Fetching
from paceline.data.torch_dataloader import loader_over_dataloader
from paceline.deprecation import warn_of_old_name
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.options.arguments import refuse_unknown


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
    **unknown: Never,
) -> Loader:
    """A loader over ``dataset`` that gives each rank its share of each ``global_batch`` samples.

    ``dataset`` is anything with ``__len__`` and ``__getitem__`` (a Dataset, a list, a tensor), an
    IterableDataset, or a torch DataLoader.

    - ``per_device_batch``, ``accumulate``: instead of ``global_batch``, which they make up:
      ``per_device_batch × data-parallel ranks × accumulate``. See ``Loader.microbatch``.
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

    The batch size of a DataLoader is the *global* batch; with ``per_device_batch``, which must be
    that batch size, it is that of each data-parallel rank instead. Its plain random or sequential
    order becomes Paceline's own, by ``seed``; any other sampler is iterated as it is on every rank,
    and each of its batches cut into shares. ``workers`` and ``pin_memory`` override the
    DataLoader's; the other arguments may only repeat what it says.
    """
    refuse_unknown(loader, unknown, error=DataError)
    asked = LoaderArguments(
        sizes=BatchSizes(global_batch, per_device_batch, accumulate),
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
    if isinstance(dataset, DataLoader):
        return loader_over_dataloader(dataset, asked)
    return _loader_over_dataset(dataset, asked)


def from_dataloader(dataloader: DataLoader[Any], **options: Any) -> Loader:
    """The old name of ``loader``, for a torch DataLoader."""
    warn_of_old_name("paceline.data.from_dataloader", "paceline.loader")
    return loader(dataloader, **options)


def _loader_over_dataset(dataset: Any, asked: LoaderArguments) -> Loader:
    if not asked.sizes.says_global:
        raise DataError(
            "global_batch is missing: say how many samples one step takes, like 64, or give "
            "per_device_batch, those that one rank puts through the model at once."
        )
    collate_fn = asked.collate_fn
    if collate_fn is not None and not callable(collate_fn):
        raise DataError(
            f"collate_fn={collate_fn!r} must be a function that makes a batch of a list of samples."
        )
    workers = check_workers(0 if asked.workers is None else asked.workers)
    seed = check_seed(asked.seed)
    streamed = is_stream(dataset)
    fixed, layout = given_share(asked.rank, asked.size, asked.layout)
    cut = BatchCut(asked.sizes.global_batch or 1, bool(asked.drop_last))
    fetching = Fetching(workers, asked.pin_memory, collate_of(dataset, collate_fn))
    sharded = asked.sharded_by_rank
    source = source_of(dataset, streamed, cut, fetching, seed, asked.shuffle, sharded)
    check_sharded(sharded, fixed, cut.drop_last)
    return Loader(source, asked.sizes, Sharing(cut.drop_last, fixed, layout, asked.compare))
