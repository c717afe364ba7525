"""Wrong calls to the loader, each with its whole message; nothing is lost by them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from paceline.data import Loader, loader, share
from paceline.errors import DataError


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def make(dataset: Any = range(10), **options: Any) -> Loader:
    return loader(dataset, **{"global_batch": 4, "rank": 0, "size": 1, **options})


def load(state: Any, **options: Any) -> None:
    make(**options).load_state_dict(state)


ORDER = {"kind": "order", "samples_per_epoch": 10, "seed": 0, "shuffle": True, "position": 3}
STREAM = {"kind": "stream", "seed": 0, "position": 3, "epoch": 0, "offset": 3}

WRONG = [
    (
        lambda: loader(range(10)),
        "global_batch is missing: say how many samples one step takes, like 64, or give "
        "per_device_batch, those that one rank puts through the model at once.",
    ),
    (
        lambda: make(global_batch=0),
        "global_batch=0 must be a whole number, 1 or more: it is the number of samples a step "
        "takes over all ranks.",
    ),
    (
        lambda: make(global_batch="64"),
        "global_batch='64' must be a whole number, 1 or more: it is the number of samples a step "
        "takes over all ranks.",
    ),
    (
        lambda: make(global_batch=6.4),
        "global_batch=6.4 must be a whole number, 1 or more: it is the number of samples a step "
        "takes over all ranks.",
    ),
    (
        lambda: make(workers=-1),
        "workers=-1 must be a whole number, 0 or more: it is the number of processes that fetch "
        "ahead.",
    ),
    (
        lambda: make(workers="two"),
        "workers='two' must be a whole number, 0 or more: it is the number of processes that fetch "
        "ahead.",
    ),
    (lambda: make(seed=1.5), "seed=1.5 must be a whole number, like 0."),
    (lambda: make(seed=None), "seed=None must be a whole number, like 0."),
    (lambda: make(shuffle="yes"), "shuffle='yes' must be True or False."),
    (lambda: make(drop_last=1), "drop_last=1 must be True or False."),
    (lambda: make(pin_memory="gpu"), "pin_memory='gpu' must be True or False."),
    (
        lambda: make(rank=2, size=2),
        "rank=2 must be from 0 to size-1=1: ranks count from 0.",
    ),
    (lambda: make(rank=-1, size=2), "rank=-1 must be from 0 to size-1=1: ranks count from 0."),
    (lambda: make(rank=0, size=0), "size=0 must be 1 or more: it is the number of ranks."),
    (lambda: make(rank="0"), "rank='0' must be a whole number."),
    (lambda: make(rank=0, size=None), "rank=0 and size=None: give both, or neither."),
    (
        lambda: share(-1, 0, 1),
        "total=-1 must be a whole number, 0 or more: it is the number of samples to share.",
    ),
    (lambda: make([]), "the dataset (list) is empty: there is no sample."),
    (lambda: make(torch.empty(0, 3)), "the dataset (Tensor) is empty: there is no sample."),
    (
        lambda: make(NoLength()),
        "the dataset (NoLength) has no __len__, so there is no order of its samples. Give it one, "
        "or make it a torch IterableDataset.",
    ),
    (
        lambda: make(torch.tensor(3)),
        "the dataset (Tensor) has no __len__, so there is no order of its samples. Give it one, or "
        "make it a torch IterableDataset.",
    ),
    (
        lambda: make(None),
        "the dataset is a NoneType, which has neither __getitem__ with __len__ nor __iter__: give "
        "a Dataset, a list, a tensor, an IterableDataset or a DataLoader.",
    ),
    (
        lambda: make({"train": [1], "test": [2]}),
        "the dataset is a dict (keys 'train', 'test'), which has no order. Pick one of its values, "
        "or wrap tensors of equal length in torch.utils.data.TensorDataset.",
    ),
    (
        lambda: make("corpus.txt"),
        "the dataset is a str: give a Dataset, a list or a tensor of samples.",
    ),
    (
        lambda: make({1, 2}),
        "the dataset is a set: give a Dataset, a list or a tensor of samples.",
    ),
    (
        lambda: make(iter([1, 2])),
        "the dataset is a list_iterator, which can be read only once: there could be no second "
        "epoch and no resume. Wrap it in a torch IterableDataset that starts it anew.",
    ),
    (
        lambda: make(make()),
        "the dataset is a Loader already: iterate it, or give what it was made of.",
    ),
    (
        lambda: make(range(3), drop_last=True),
        "drop_last=True drops all 3 samples of the dataset: they are fewer than global_batch=4. "
        "Keep the short batch, or take a smaller one.",
    ),
    (
        lambda: make(Stream(), shuffle=True),
        "shuffle=True: a Stream comes in its own order, which Paceline cannot shuffle. Shuffle "
        "inside the dataset, or leave shuffle out.",
    ),
    (
        lambda: make(Stream(), workers=2),
        "workers=2: each worker would read its own copy of the stream, and the order would depend "
        "on how many there are. A stream may have 0 workers or 1; prefetch inside the dataset, or "
        "use a dataset with __getitem__ and __len__.",
    ),
    (
        lambda: make().seek(-1),
        "seek: position=-1 must be a whole number, 0 or more: samples delivered since the start of "
        "the first epoch.",
    ),
    (
        lambda: make().seek(2.0),
        "seek: position=2.0 must be a whole number, 0 or more: samples delivered since the start "
        "of the first epoch.",
    ),
    (
        lambda: load(7),
        "load_state_dict: got a int, but needs the dict that state_dict gave.",
    ),
    (
        lambda: load({"step": 3}),
        "load_state_dict: the state has no 'kind', only ['step']: it is not the state of a loader.",
    ),
    (
        lambda: load({**ORDER, "samples_per_epoch": 11}),
        "load_state_dict: the state was saved with samples_per_epoch=11, but this loader has "
        "samples_per_epoch=10, so its position would mean other samples. Make the loader with "
        "samples_per_epoch=11, or go to a position of your own with seek.",
    ),
    (
        lambda: load(ORDER, seed=5),
        "load_state_dict: the state was saved with seed=0, but this loader has seed=5, so its "
        "position would mean other samples. Make the loader with seed=0, or go to a position of "
        "your own with seek.",
    ),
    (
        lambda: load(ORDER, shuffle=False),
        "load_state_dict: the state was saved with shuffle=True, but this loader has "
        "shuffle=False, so its position would mean other samples. Make the loader with "
        "shuffle=True, or go to a position of your own with seek.",
    ),
    (
        lambda: load(STREAM),
        "load_state_dict: the state was saved with kind='stream', but this loader has "
        "kind='order', so its position would mean other samples. Make the loader with "
        "kind='stream', or go to a position of your own with seek.",
    ),
    (
        lambda: load({**ORDER, "position": -4}),
        "load_state_dict: position=-4 must be a whole number, 0 or more.",
    ),
    (
        lambda: load({k: v for k, v in ORDER.items() if k != "position"}),
        "load_state_dict: the state has no 'position': it is not complete.",
    ),
    (
        lambda: load({**ORDER, "workers": 2}),
        "load_state_dict: 'workers' is no part of a loader's state.",
    ),
    (
        lambda: load({**STREAM, "offset": "3"}, dataset=Stream()),
        "load_state_dict: offset='3' must be a whole number, 0 or more.",
    ),
    (
        lambda: load({**STREAM, "state": {"dataset": 1, "random": {}}}, dataset=Stream()),
        "the state holds a stream's own state_dict, but this Stream has no load_state_dict to take "
        "it. Give the dataset that the state was saved with.",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_calls_say_what_and_why(call: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == message


def test_a_refused_state_or_position_leaves_the_loader_where_it_was() -> None:
    data = make()
    data.seek(14)
    for refused in (
        lambda: data.load_state_dict({**ORDER, "seed": 1}),
        lambda: data.load_state_dict({}),
        lambda: data.seek(-1),
    ):
        with pytest.raises(DataError):
            refused()
    assert data.position == 14


def test_a_failing_sample_says_its_own_error() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            raise KeyError(f"no sample {index}")

    with pytest.raises(KeyError, match="no sample"):
        list(make(Broken()))
