"""A loader over what a torch DataLoader reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.data.arguments import (
    LoaderArguments,
    check_seed,
    check_sharded,
    check_stream_workers,
    check_workers,
    length_of,
)
from paceline.data.batch_shares import BatchCut
from paceline.data.choose_source import NOT_A_STREAM, given_share, source_of
from paceline.data.custom_sampler import SamplerSource
from paceline.data.huggingface import collate_of
from paceline.data.iterable_dataset import BatchSource
from paceline.data.loader import Loader, Sharing
from paceline.data.sample_source import Fetching, SampleSource
from paceline.errors import DataError
from paceline.layout.batch import BatchSizes


def loader_over_dataloader(dataloader: DataLoader[Any], asked: LoaderArguments) -> Loader:
    """A loader over what ``dataloader`` reads; ``paceline.loader`` says how."""
    dataset: Any = dataloader.dataset
    batches: Any = dataloader.batch_sampler  # None where the dataset makes its own batches
    plain = type(batches) is BatchSampler  # the one that DataLoader(batch_size=…) makes
    sampler: Any = batches.sampler if plain else dataloader.sampler
    _refuse_distributed(batches, sampler, getattr(batches, "sampler", None))
    order = _order_of(sampler, dataset) if plain else None
    drops = bool(batches.drop_last if plain else dataloader.drop_last)
    sizes, found = _sizes_of(dataloader, asked.sizes)
    _refuse_conflict("drop_last", asked.drop_last, "drop_last", drops)
    _refuse_conflict("collate_fn", asked.collate_fn, "collate_fn", dataloader.collate_fn)
    _refuse_conflict("shuffle", asked.shuffle, "shuffle", order)
    fetching = _fetching_of(dataloader, asked.workers, asked.pin_memory)
    seed = check_seed(asked.seed)
    fixed, layout = given_share(asked.rank, asked.size, asked.layout)
    cut = BatchCut(sizes.global_batch or 1, drops)
    streamed = isinstance(dataset, IterableDataset)
    if streamed:
        check_stream_workers(fetching.workers)
    elif asked.shuffle and order is None:
        raise DataError(
            f"shuffle=True: the DataLoader's own {type(sampler if plain else batches).__name__} "
            "decides the order. Leave shuffle out."
        )
    said = any(asked.sizes.stated().values())
    sharing = Sharing(drops, fixed, layout, asked.compare, None if said else found)
    check_sharded(asked.sharded_by_rank, fixed, cut.drop_last)
    source: SampleSource
    if batches is None:
        _refuse_conflict("workers", asked.workers, "num_workers", dataloader.num_workers)
        _refuse_conflict("pin_memory", asked.pin_memory, "pin_memory", dataloader.pin_memory)
        if asked.sharded_by_rank:
            raise DataError(
                "sharded_by_rank=True with a DataLoader that has batch_size=None, whose batches "
                "have sizes of their own. Give the DataLoader a batch_size, or the dataset itself."
            )
        source = BatchSource(dataloader, cut, seed)
    elif streamed or order is not None:
        shuffles = asked.shuffle if streamed else order
        source = source_of(dataset, streamed, cut, fetching, seed, shuffles, asked.sharded_by_rank)
    elif asked.sharded_by_rank:
        raise DataError(NOT_A_STREAM)
    else:
        _refuse_other_batches(batches, plain, sizes)
        source = SamplerSource(dataset, batches, cut, fetching, seed)
    return Loader(source, sizes, sharing)


def sizes_over(data: Any, given: BatchSizes) -> BatchSizes:
    """The sizes that ``data`` and the caller name together: a DataLoader has a batch size."""
    if not isinstance(data, DataLoader):
        return given
    return _sizes_of(data, given)[0]


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
    whole = length_of(dataset) is not None and len(sampler) == len(sampler.data_source) == len(
        dataset
    )
    return shuffles if whole else None


def _fetching_of(
    dataloader: DataLoader[Any], workers: int | None, pin_memory: bool | None
) -> Fetching:
    count = dataloader.num_workers if workers is None else workers
    count = check_workers(count)
    options: dict[str, Any] = {}
    if count:
        options["worker_init_fn"] = dataloader.worker_init_fn
        options["timeout"] = dataloader.timeout
        if dataloader.num_workers:
            options["prefetch_factor"] = dataloader.prefetch_factor
            options["multiprocessing_context"] = dataloader.multiprocessing_context
    pin = dataloader.pin_memory if pin_memory is None else pin_memory
    collate: Any = dataloader.collate_fn
    return Fetching(count, pin, collate_of(dataloader.dataset, collate), options)


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
