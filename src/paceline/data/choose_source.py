"""Which kind of source a dataset is read through, and which share of it is this process's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch.utils.data import IterableDataset

from paceline.data.arguments import check_rank, check_stream_workers, length_of
from paceline.data.batch_shares import BatchCut
from paceline.data.iterable_dataset import StreamSource
from paceline.data.loader import Loader
from paceline.data.map_dataset import OrderSource
from paceline.data.rank_sharded_stream import RankStreamSource
from paceline.data.sample_source import Fetching, SampleSource
from paceline.data.sharded_dataset import is_presharded, of_presharded
from paceline.data.shuffle_order import order_of
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.world import World

NOT_A_STREAM = (
    "sharded_by_rank=True is for streams (IterableDataset). Of a dataset with __getitem__ every "
    "rank holds all, and Paceline gives each its share: leave it out."
)


def source_of(
    dataset: Any,
    streamed: bool,
    cut: BatchCut,
    fetching: Fetching,
    seed: int,
    shuffle: bool | None,
    sharded_by_rank: bool,
) -> SampleSource:
    """What a loader over ``dataset`` reads from; ``DataError`` where the arguments clash."""
    if streamed and is_presharded(dataset) and not sharded_by_rank:
        dataset, streamed = of_presharded(dataset), False
    if streamed:
        if shuffle:
            raise DataError(
                f"shuffle=True: a {type(dataset).__name__} comes in its own order, which Paceline "
                "cannot shuffle. Shuffle inside the dataset, or leave shuffle out."
            )
        check_stream_workers(fetching.workers)
        if sharded_by_rank:
            return RankStreamSource(dataset, cut, fetching, seed)
        return StreamSource(dataset, cut, fetching, seed)
    if sharded_by_rank:
        raise DataError(NOT_A_STREAM)
    if len(dataset) == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) is empty: there is no sample.")
    return OrderSource(dataset, order_of(dataset, seed, shuffle is not False), cut, fetching)


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is read in sequence; ``DataError`` if it cannot be read at all."""
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
        if length_of(dataset) is None:
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


def given_share(
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
