"""Making a loader out of what the user has: a dataset, a stream or a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.data.checks import check_rank, whole_number
from paceline.data.loader import Loader
from paceline.data.mapped import OrderSource
from paceline.data.order import Order
from paceline.data.sampled import SamplerSource, length
from paceline.data.slices import Cut
from paceline.data.source import Collate, Fetching
from paceline.data.streams import BatchSource, StreamSource
from paceline.errors import DataError
from paceline.layout import Layout


def loader(
    dataset: Any,
    *,
    global_batch: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    workers: int | None = None,
    pin_memory: bool | None = None,
    collate_fn: Collate | None = None,
    rank: int | None = None,
    size: int | None = None,
    layout: str | Layout | None = None,
) -> Loader:
    """A loader over ``dataset`` that gives each rank its share of each ``global_batch`` samples.

    ``dataset`` is anything with ``__len__`` and ``__getitem__`` (a Dataset, a list, a tensor), an
    IterableDataset, or a torch DataLoader (then see :func:`from_dataloader`).

    - ``shuffle``: a new order each epoch, by ``seed``; on unless switched off. Streams keep theirs.
    - ``drop_last``: leave out a last batch that is short of ``global_batch``; it is kept unless
      asked for.
    - ``workers``: processes that fetch ahead; 0 fetches in this one.
    - ``pin_memory``: by default where this rank's device is a GPU.
    - ``collate_fn``: makes a batch of a list of samples; torch's ``default_collate`` by default.
    - ``layout``: ranks that a layout puts on the same samples (``tp``, ``pp``) get the same; by
      default the layout of the engine in this process, or one rank to a share where there is none.
    - ``rank``, ``size``: instead of a layout, which of how many shares this process gets.
    """
    _check_flags(shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
    if isinstance(dataset, DataLoader):
        return from_dataloader(
            dataset,
            global_batch=global_batch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            rank=rank,
            size=size,
            layout=layout,
        )
    if global_batch is None:
        raise DataError("global_batch is missing: say how many samples one step takes, like 64.")
    whole_number("global_batch", global_batch, 1, "number of samples a step takes over all ranks")
    if collate_fn is not None and not callable(collate_fn):
        raise DataError(
            f"collate_fn={collate_fn!r} must be a function that makes a batch of a list of samples."
        )
    workers = _check_workers(0 if workers is None else workers)
    seed = _check_seed(seed)
    streamed = _is_stream(dataset)
    rank, size, on_gpu = _share_of(rank, size, layout)
    cut = Cut(global_batch, bool(drop_last), rank, size)
    pin = on_gpu if pin_memory is None else pin_memory
    fetching = Fetching(workers, pin, collate_fn or default_collate)
    return _over_dataset(dataset, streamed, cut, fetching, seed, shuffle)


def from_dataloader(
    dataloader: DataLoader[Any],
    *,
    global_batch: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    workers: int | None = None,
    pin_memory: bool | None = None,
    collate_fn: Collate | None = None,
    rank: int | None = None,
    size: int | None = None,
    layout: str | Layout | None = None,
) -> Loader:
    """A loader over what a torch DataLoader reads; its batch size is the *global* batch.

    Its plain random or sequential order becomes Paceline's own, by ``seed``; any other sampler is
    iterated as it is on every rank, and each of its batches cut into shares. ``workers`` and
    ``pin_memory`` override the DataLoader's; the other arguments may only repeat what it says.
    """
    _check_flags(shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
    dataset: Any = dataloader.dataset
    batches: Any = dataloader.batch_sampler  # None where the dataset makes its own batches
    plain = type(batches) is BatchSampler  # the one that DataLoader(batch_size=…) makes
    sampler: Any = batches.sampler if plain else dataloader.sampler
    _refuse_distributed(batches, sampler)
    order = _order_of(sampler, dataset) if plain else None
    drops = bool(batches.drop_last if plain else dataloader.drop_last)
    batch_size = _batch_size_of(dataloader, global_batch)
    _refuse_conflict("drop_last", drop_last, "drop_last", drops)
    _refuse_conflict("collate_fn", collate_fn, "collate_fn", dataloader.collate_fn)
    _refuse_conflict("shuffle", shuffle, "shuffle", order)
    fetching = _fetching_of(dataloader, workers, pin_memory)
    seed = _check_seed(seed)
    rank, size, _ = _share_of(rank, size, layout)
    cut = Cut(batch_size or 1, drops, rank, size)
    streamed = isinstance(dataset, IterableDataset)
    if streamed:
        _refuse_workers(fetching.workers)
    elif shuffle and order is None:
        raise DataError(
            f"shuffle=True: the DataLoader's own {type(sampler if plain else batches).__name__} "
            "decides the order. Leave shuffle out."
        )
    if batches is None:
        _refuse_conflict("workers", workers, "num_workers", dataloader.num_workers)
        _refuse_conflict("pin_memory", pin_memory, "pin_memory", dataloader.pin_memory)
        return Loader(BatchSource(dataloader, cut, seed), batch_size)
    if streamed or order is not None:
        return _over_dataset(dataset, streamed, cut, fetching, seed, shuffle if streamed else order)
    return Loader(SamplerSource(dataset, batches, cut, fetching, seed), batch_size)


def _over_dataset(
    dataset: Any, streamed: bool, cut: Cut, fetching: Fetching, seed: int, shuffle: bool | None
) -> Loader:
    if streamed:
        if shuffle:
            raise DataError(
                f"shuffle=True: a {type(dataset).__name__} comes in its own order, which Paceline "
                "cannot shuffle. Shuffle inside the dataset, or leave shuffle out."
            )
        _refuse_workers(fetching.workers)
        return Loader(StreamSource(dataset, cut, fetching, seed), cut.global_batch)
    n = len(dataset)
    if n == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) is empty: there is no sample.")
    if cut.drop_last and n < cut.global_batch:
        raise DataError(
            f"drop_last=True drops all {n} samples of the dataset: they are fewer than "
            f"global_batch={cut.global_batch}. Keep the short batch, or take a smaller one."
        )
    order = Order(n, seed, shuffle is not False)
    return Loader(OrderSource(dataset, order, cut, fetching), cut.global_batch)


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


def _share_of(
    rank: int | None, size: int | None, layout: str | Layout | None
) -> tuple[int, int, bool]:
    """Which share of how many this process gets, and whether it trains on a GPU."""
    if (rank is None) != (size is None):
        raise DataError(f"rank={rank} and size={size}: give both, or neither.")
    if rank is not None and layout is not None:
        raise DataError(f"rank={rank} and layout={str(layout)!r}: give one of them.")
    if rank is None or size is None:
        from paceline.world import World

        world = World.current()
        chosen = world.layout if layout is None else Layout.parse(layout, world_size=world.size)
        chosen = Layout(dp=world.size) if chosen is None else chosen
        chosen.check_world(world.size)
        return chosen.place(world.rank).dp, chosen.dp, world.device.type == "cuda"
    check_rank(rank, size)
    return rank, size, torch.cuda.is_available()


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


def _batch_size_of(dataloader: DataLoader[Any], global_batch: int | None) -> int | None:
    """The DataLoader's batch size; where it does not say one, the caller's word stands."""
    if global_batch is not None:
        whole_number("global_batch", global_batch, 1, "number of samples a step takes")
    found = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
    if not isinstance(found, int):
        return global_batch
    _refuse_conflict("global_batch", global_batch, "batch_size", found)
    return found


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
            "global batch as its batch_size."
        )


def _refuse_workers(workers: int) -> None:
    if workers > 1:
        raise DataError(
            f"workers={workers}: each worker would read its own copy of the stream, and the order "
            "would depend on how many there are. A stream may have 0 workers or 1; prefetch inside "
            "the dataset, or use a dataset with __getitem__ and __len__."
        )
