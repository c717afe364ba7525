"""Making a loader out of what the user has: a dataset, a stream or a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.data.batch_shares import BatchCut
from paceline.data.checks import check_rank, whole_number
from paceline.data.custom_sampler import SamplerSource, length
from paceline.data.iterable_dataset import BatchSource, StreamSource
from paceline.data.loader import Loader, Sharing
from paceline.data.map_dataset import OrderSource
from paceline.data.rank_sharded_stream import RankStreamSource
from paceline.data.sample_source import Collate, Fetching, SampleSource
from paceline.data.shuffle_order import Order
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.world import World

_NOT_A_STREAM = (
    "sharded_by_rank=True is for streams (IterableDataset). Of a dataset with __getitem__ every "
    "rank holds all, and Paceline gives each its share: leave it out."
)


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
    _check_flags(
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
    workers = _check_workers(0 if workers is None else workers)
    seed = _check_seed(seed)
    streamed = _is_stream(dataset)
    fixed, layout = _given_share(rank, size, layout)
    cut = BatchCut(global_batch or 1, bool(drop_last))
    fetching = Fetching(workers, pin_memory, collate_fn or default_collate)
    source = _source_of(dataset, streamed, cut, fetching, seed, shuffle, sharded_by_rank)
    _check_sharded(sharded_by_rank, fixed, cut)
    return Loader(source, sizes, Sharing(cut.drop_last, fixed, layout, compare))


def from_dataloader(
    dataloader: DataLoader[Any],
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
    """A loader over what a torch DataLoader reads; its batch size is the *global* batch.

    With ``per_device_batch``, which must be the DataLoader's batch size, it is that of each
    data-parallel rank instead.

    Its plain random or sequential order becomes Paceline's own, by ``seed``; any other sampler is
    iterated as it is on every rank, and each of its batches cut into shares. ``workers`` and
    ``pin_memory`` override the DataLoader's; the other arguments may only repeat what it says.
    """
    _check_flags(
        shuffle=shuffle,
        drop_last=drop_last,
        pin_memory=pin_memory,
        sharded_by_rank=sharded_by_rank,
        compare=compare,
    )
    dataset: Any = dataloader.dataset
    batches: Any = dataloader.batch_sampler  # None where the dataset makes its own batches
    plain = type(batches) is BatchSampler  # the one that DataLoader(batch_size=…) makes
    sampler: Any = batches.sampler if plain else dataloader.sampler
    _refuse_distributed(batches, sampler, getattr(batches, "sampler", None))
    order = _order_of(sampler, dataset) if plain else None
    drops = bool(batches.drop_last if plain else dataloader.drop_last)
    sizes, found = _sizes_of(dataloader, BatchSizes(global_batch, per_device_batch, accumulate))
    _refuse_conflict("drop_last", drop_last, "drop_last", drops)
    _refuse_conflict("collate_fn", collate_fn, "collate_fn", dataloader.collate_fn)
    _refuse_conflict("shuffle", shuffle, "shuffle", order)
    fetching = _fetching_of(dataloader, workers, pin_memory)
    seed = _check_seed(seed)
    fixed, layout = _given_share(rank, size, layout)
    cut = BatchCut(sizes.global_batch or 1, drops)
    streamed = isinstance(dataset, IterableDataset)
    if streamed:
        _refuse_workers(fetching.workers)
    elif shuffle and order is None:
        raise DataError(
            f"shuffle=True: the DataLoader's own {type(sampler if plain else batches).__name__} "
            "decides the order. Leave shuffle out."
        )
    said = global_batch or per_device_batch or accumulate
    sharing = Sharing(drops, fixed, layout, compare, None if said else found)
    _check_sharded(sharded_by_rank, fixed, cut)
    source: SampleSource
    if batches is None:
        _refuse_conflict("workers", workers, "num_workers", dataloader.num_workers)
        _refuse_conflict("pin_memory", pin_memory, "pin_memory", dataloader.pin_memory)
        if sharded_by_rank:
            raise DataError(
                "sharded_by_rank=True with a DataLoader that has batch_size=None, whose batches "
                "have sizes of their own. Give the DataLoader a batch_size, or the dataset itself."
            )
        source = BatchSource(dataloader, cut, seed)
    elif streamed or order is not None:
        shuffles = shuffle if streamed else order
        source = _source_of(dataset, streamed, cut, fetching, seed, shuffles, sharded_by_rank)
    elif sharded_by_rank:
        raise DataError(_NOT_A_STREAM)
    else:
        _refuse_other_batches(batches, plain, sizes)
        source = SamplerSource(dataset, batches, cut, fetching, seed)
    return Loader(source, sizes, sharing)


def _source_of(
    dataset: Any,
    streamed: bool,
    cut: BatchCut,
    fetching: Fetching,
    seed: int,
    shuffle: bool | None,
    sharded_by_rank: bool,
) -> SampleSource:
    if streamed:
        if shuffle:
            raise DataError(
                f"shuffle=True: a {type(dataset).__name__} comes in its own order, which Paceline "
                "cannot shuffle. Shuffle inside the dataset, or leave shuffle out."
            )
        _refuse_workers(fetching.workers)
        if sharded_by_rank:
            return RankStreamSource(dataset, cut, fetching, seed)
        return StreamSource(dataset, cut, fetching, seed)
    if sharded_by_rank:
        raise DataError(_NOT_A_STREAM)
    n = len(dataset)
    if n == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) is empty: there is no sample.")
    return OrderSource(dataset, Order(n, seed, shuffle is not False), cut, fetching)


def _is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is read in sequence; :class:`DataError` if it cannot be read at all."""
    name = type(dataset).__name__
    if isinstance(dataset, Loader):
        raise DataError("the dataset is a Loader already: iterate it, or give what it was made of.")
    if isinstance(dataset, Mapping):
        keys = ", ".join(repr(key) for key in list(dataset)[:3])
        raise DataError(
            f"the dataset is a {name} (keys {keys}), which has no order. Pick one of its values, "
            "or wrap tensors of equal length in torch.utils.data.TensorDataset."
        )
    if isinstance(dataset, str | bytes | AbstractSet):
        raise DataError(f"the dataset is a {name}: give a Dataset, a list or a tensor of samples.")
    if isinstance(dataset, Iterator):
        raise DataError(
            f"the dataset is a {name}, which can be read only once: there could be no second "
            "epoch and no resume. Wrap it in a torch IterableDataset that starts it anew."
        )
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__"):
        if length(dataset) is None:
            raise DataError(
                f"the dataset ({name}) has no __len__, so there is no order of its samples. Give "
                "it one, or make it a torch IterableDataset."
            )
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise DataError(
        f"the dataset is a {name}, which has neither __getitem__ with __len__ nor __iter__: give a "
        "Dataset, a list, a tensor, an IterableDataset or a DataLoader."
    )


def _given_share(
    rank: int | None, size: int | None, layout: str | Layout | None
) -> tuple[tuple[int, int] | None, Layout | None]:
    """The share of this process where rank and size say it, or the layout that does."""
    if (rank is None) != (size is None):
        raise DataError(f"rank={rank} and size={size}: give both, or neither.")
    if rank is not None and layout is not None:
        raise DataError(f"rank={rank} and layout={str(layout)!r}: give one of them.")
    if rank is not None and size is not None:
        check_rank(rank, size)
        return (rank, size), None
    if layout is None:
        return None, None
    world = World.current()
    parsed = Layout.parse(layout, world_size=world.size)
    parsed.check_world(world.size)
    return None, parsed


def _check_sharded(sharded_by_rank: bool, fixed: tuple[int, int] | None, cut: BatchCut) -> None:
    if sharded_by_rank and fixed is not None and fixed[1] > 1:
        raise DataError(
            f"sharded_by_rank=True with rank={fixed[0]}, size={fixed[1]}: ranks that read their "
            "own streams tell each other how many samples they have, for which they need a world. "
            "Leave rank and size out."
        )
    if sharded_by_rank and cut.drop_last:
        raise DataError(
            "drop_last=True with sharded_by_rank: once the shortest stream has ended, every batch "
            "is short, and all that is left of the others would be dropped. Leave drop_last out: "
            "ranks whose stream has ended get empty batches until all have."
        )


def _check_seed(seed: Any) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise DataError(f"seed={seed!r} must be a whole number, like 0.")
    return seed


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise DataError(f"{name}={value!r} must be True or False.")


def _check_workers(workers: Any) -> int:
    return whole_number("workers", workers, 0, "number of processes that fetch ahead")


def _sizes_of(dataloader: DataLoader[Any], given: BatchSizes) -> tuple[BatchSizes, int | None]:
    """The sizes that DataLoader and caller name together, and the DataLoader's batch size."""
    found = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
    if not isinstance(found, int):
        if given.says_global and given.global_batch is None:
            raise DataError(
                f"per_device_batch={given.per_device_batch}: the DataLoader makes batches of its "
                "own size, each of them a global batch. Leave it out, or give the DataLoader a "
                "batch_size."
            )
        return given, None
    if given.per_device_batch is not None:
        _refuse_conflict("per_device_batch", given.per_device_batch, "batch_size", found)
        return given, found
    _refuse_conflict("global_batch", given.global_batch, "batch_size", found)
    return replace(given, global_batch=found), found


def sizes_over(data: Any, given: BatchSizes) -> BatchSizes:
    """The sizes that ``data`` and the caller name together: a DataLoader has a batch size."""
    if not isinstance(data, DataLoader):
        return given
    return _sizes_of(data, given)[0]


def _refuse_other_batches(batches: Any, plain: bool, sizes: BatchSizes) -> None:
    if not plain and sizes.follows_ranks:
        raise DataError(
            f"per_device_batch={sizes.per_device_batch}: the DataLoader's own "
            f"{type(batches).__name__} makes the batches, each of them a global batch. Leave it "
            "out, or give a sampler and a batch_size instead of a batch sampler."
        )


def _order_of(sampler: Any, dataset: Any) -> bool | None:
    """Whether a sampler shuffles the whole dataset; ``None`` if it does something of its own."""
    if type(sampler) is SequentialSampler:
        shuffles = False
    elif type(sampler) is RandomSampler and not sampler.replacement:
        shuffles = True
    else:
        return None
    whole = length(dataset) is not None and len(sampler) == len(sampler.data_source) == len(dataset)
    return shuffles if whole else None


def _fetching_of(
    dataloader: DataLoader[Any], workers: int | None, pin_memory: bool | None
) -> Fetching:
    count = dataloader.num_workers if workers is None else workers
    count = _check_workers(count)
    options: dict[str, Any] = {}
    if count:
        options["worker_init_fn"] = dataloader.worker_init_fn
        options["timeout"] = dataloader.timeout
        if dataloader.num_workers:
            options["prefetch_factor"] = dataloader.prefetch_factor
            options["multiprocessing_context"] = dataloader.multiprocessing_context
    pin = dataloader.pin_memory if pin_memory is None else pin_memory
    return Fetching(count, pin, dataloader.collate_fn, options)


def _refuse_conflict(name: str, given: Any, theirs: str, found: Any) -> None:
    if given is not None and found is not None and given != found:
        raise DataError(
            f"{name}={_shown(given)} does not agree with the DataLoader's "
            f"{theirs}={_shown(found)}. Leave {name} out, or make the DataLoader with "
            f"{theirs}={_shown(given)}."
        )


def _shown(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def _refuse_distributed(*samplers: Any) -> None:
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise DataError(
            "the DataLoader has a DistributedSampler, which gives each rank other samples; "
            "Paceline cuts each global batch itself. Make the DataLoader with shuffle=True and the "
            "global batch as its batch_size, or pass per_device_batch with that of one rank."
        )


def _refuse_workers(workers: int) -> None:
    if workers > 1:
        raise DataError(
            f"workers={workers}: each worker would read its own copy of the stream, and the order "
            "would depend on how many there are. A stream may have 0 workers or 1; prefetch inside "
            "the dataset, or use a dataset with __getitem__ and __len__."
        )
