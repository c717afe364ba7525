"""What ``fit`` is given from habit: understood, or refused with the next step."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import paceline
from paceline.errors import DataError

X, Y = torch.arange(16.0).reshape(8, 2) / 16, torch.ones(8, 1)


def fit(*data: Any, **options: Any) -> list[float]:
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss(), progress=False, **options
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
    ],
)
def test_what_is_no_data_is_refused_with_the_next_step(
    data: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        fit(*data, **options)
    assert said in str(caught.value)
