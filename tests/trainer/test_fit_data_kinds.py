"""What ``fit`` is given from habit: understood, or refused with the next step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import datasets
import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import paceline
from paceline.errors import DataError

X, Y = torch.arange(16.0).reshape(8, 2) / 16, torch.ones(8, 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(X, Y, strict=True)))


def columns() -> Any:
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})


def by_name(model: nn.Module, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def fit(*data: Any, **options: Any) -> list[float]:
    torch.manual_seed(0)
    if "forward" not in options:
        options["loss"] = nn.MSELoss()
    trainer = paceline.Trainer(
        nn.Linear(2, 1), optimizer=torch.optim.SGD, progress=False, **options
    )
    return trainer.fit(*data, epochs=1).losses


def test_ready_batches_and_other_samplers_train_as_the_dataset_does() -> None:
    batches = [(X[i : i + 4], Y[i : i + 4]) for i in (0, 4)]
    dataset = TensorDataset(X, Y)
    wanted = fit(DataLoader(dataset, batch_size=4))
    assert len(wanted) == 2
    assert fit(DataLoader(batches, batch_size=None)) == wanted  # type: ignore[arg-type]
    sampler = BatchSampler(SequentialSampler(dataset), 4, drop_last=False)
    assert fit(DataLoader(dataset, batch_sampler=sampler)) == wanted


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        ((nn.Linear(2, 1), [1]), {}, "the model belongs to the Trainer, and fit takes the data"),
        ((X, Y), {}, "fit(x, y): inputs and targets as columns are one dataset"),
        (((X, Y),), {}, "fit(train=(x, y)): inputs and targets as columns are one dataset"),
        (((numpy.ones((8, 2)), numpy.ones(8)),), {}, "torch.from_numpy for arrays"),
        (([(X, Y)], (X, Y)), {}, "fit(val=(x, y)): inputs and targets as columns"),
        (([(X, Y)],), {}, "ready batches, wrap it: torch.utils.data.DataLoader(data, batch_size"),
        ((iter([(X, Y)]),), {"global_batch": 4}, "can be read only once"),
        ((zip(X.numpy(), Y.numpy(), strict=True),), {"global_batch": 4}, "can be read only once"),
        ((Stream(),), {}, "got a Stream: pass global_batch= to the Trainer"),
        (
            (Stream(),),
            {"global_batch": 4, "data": paceline.DataOptions(shuffle=True)},
            "a Stream comes in its own order, which Paceline cannot shuffle",
        ),
        ((columns(),), {"global_batch": 4}, 'Pass dataset.with_format("torch")'),
        ((columns().to_iterable_dataset(),), {"global_batch": 4}, "the column 'x' of the Hugging"),
        ((DataLoader(columns(), batch_size=4),), {}, 'Pass dataset.with_format("torch")'),
        ((datasets.DatasetDict(train=columns()),), {"global_batch": 4}, "Pick one of its values"),
        (({"x": X.numpy(), "y": Y.numpy()},), {"global_batch": 4}, "TensorDataset"),
    ],
)
def test_what_is_no_data_is_refused_with_the_next_step(
    data: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        fit(*data, **options)
    assert said in str(caught.value)


def every_kind() -> dict[str, list[float]]:
    """The losses of the same samples in the same order, from everything that may hold them."""
    in_order = {"global_batch": 4, "data": paceline.DataOptions(shuffle=False)}
    named: dict[str, Any] = {**in_order, "forward": by_name}
    tensors = columns().with_format("torch")
    arrays = list(zip(X.numpy(), Y.numpy(), strict=True))
    streamed = {name: named[name] for name in ("global_batch", "forward")}
    return {
        "tensors": fit(TensorDataset(X, Y), **in_order),
        "arrays": fit(arrays, **in_order),
        "stream": fit(Stream(), global_batch=4),
        "stream in a DataLoader": fit(DataLoader(Stream(), batch_size=4)),
        "Hugging Face": fit(tensors, **named),
        "Hugging Face, arrays": fit(columns().with_format("numpy"), **named),
        "Hugging Face, stream": fit(tensors.to_iterable_dataset(), **streamed),
        "Hugging Face in a DataLoader": fit(DataLoader(tensors, batch_size=4), forward=by_name),
    }


def test_everything_that_holds_samples_trains_alike_on_one_and_two_ranks(rank_pool: Any) -> None:
    wanted = every_kind()["tensors"]
    assert len(wanted) == 2
    for found in (every_kind(), *rank_pool.run(every_kind, world_size=2)):
        for kind, losses in found.items():
            # Two ranks add the samples of a batch in another order.
            assert losses == pytest.approx(wanted, rel=1e-6), kind


def test_a_list_of_ready_batches_read_as_samples_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    ready = [(X[i : i + 4], Y[i : i + 4]) for i in (0, 4)]
    for items in (ready, [{"x": x, "y": y} for x, y in ready]):
        caplog.clear()
        fit(items, global_batch=2, **({"forward": by_name} if items is not ready else {}))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == (
            "The 2 items of the list are read as samples, with tensors of [4, 2] and [4, 1]. Where "
            "they are ready batches, wrap it: torch.utils.data.DataLoader(data, batch_size=None)."
        )
    caplog.clear()
    fit(list(zip(X, Y, strict=True)), global_batch=4)
    fit([(x, x.sum(0, keepdim=True)) for x in X], global_batch=4)
    assert not caplog.records
