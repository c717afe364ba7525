"""Bugs tried out on one process: does a model that has them compute what the layout computed?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.batch import batch_size
from paceline.prove.jobs import load
from paceline.prove.observed_run import endless
from paceline.prove.sample_weights import loss_terms, set_state
from paceline.prove.subject import Subject


def explains_loss(
    subject: Subject, folder: Path, step: int, split: Mapping[str, int], tp: int, loss: float
) -> bool:
    """Whether row-parallel biases that count ``tp`` times give the ``loss`` of ``step``.

    ``split`` are the parameters that tensor parallelism splits, with the dimension of the cut.
    """
    built = subject.build()
    model = built.model.double()
    set_state(model, load(folder, step - 1))
    rows = _row_parallel(model, split)
    if not rows:
        return False
    loader = subject.loader(built, 0, 1)
    batch = next(itertools.islice(endless(loader), step - 1, None))
    loader.close()
    with torch.no_grad():
        right = _mean(loss_terms(built, batch, batch_size(batch)))
        with _biases_times(model, rows, tp):
            wrong = _mean(loss_terms(built, batch, batch_size(batch)))
    return abs(wrong - right) > 0 and abs(wrong - loss) <= 1e-3 * abs(wrong - right)


def _row_parallel(model: nn.Module, split: Mapping[str, int]) -> list[str]:
    """Modules whose weight is split and whose bias is not: each rank has a term of their sum."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for name in split:
        owner, _, last = name.rpartition(".")
        bias = f"{owner}.bias" if owner else "bias"
        if last == "weight" and bias in parameters and bias not in split:
            found.append(owner)
    return found


@contextlib.contextmanager
def _biases_times(model: nn.Module, names: list[str], times: int) -> Iterator[None]:
    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        bias = module.bias
        assert isinstance(bias, Tensor)
        return output + (times - 1) * bias

    handles = [model.get_submodule(name).register_forward_hook(add) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mean(terms: Iterator[tuple[Tensor, float]]) -> float:
    total, count = 0.0, 0.0
    for term, items in terms:
        total += float(term)
        count += items
    return total / max(count, 1.0)
