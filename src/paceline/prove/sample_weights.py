"""What a wrong gradient is made of: with which weight it holds each sample's own gradient.

The gradient of a mean over ``C`` items is the sum of the samples' gradients, each times ``1/C``. A
layout that averages wrongly gives some samples another weight. So the samples' gradients are
computed one by one on one process, the weights are fitted to the gradient that the layout found,
and the bug can be read from them: zero, twice, the same factor for all, one factor a rank, ….
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.batch import batch_size, move, narrow
from paceline.engine.loss import LossModule
from paceline.engine.precision import Precision
from paceline.prove.cases import Case
from paceline.prove.comparison import Values, sketch
from paceline.prove.jobs import load
from paceline.prove.no_dropout import NoDropout
from paceline.prove.observed_run import endless
from paceline.prove.subject import Built, Subject

_FITS = 1e-4
"""The fit explains the gradient when this share of it, or less, is left over."""


@dataclass(frozen=True)
class Weights:
    """By sample of the global batch: its weight over the right one, and the items it counts."""

    of: list[float]
    items: list[float]
    rank_norms: list[float]
    """By data-parallel rank: the norm of what it adds to the mean, times the number of ranks."""


def find_weights(
    subject: Subject, case: Case, folder: Path, step: int, observed: Tensor
) -> Weights | None:
    """Fit the samples' weights to the gradient a rank had in ``step``; ``None`` if none fit."""
    built = subject.build()
    model = built.model.double()
    set_state(model, load(folder, step - 1))
    loader = subject.loader(built, 0, 1)
    batch = next(itertools.islice(endless(loader), step - 1, None))
    loader.close()
    samples = batch_size(batch)
    owners = {i: rank for (rank, _), own in case.pieces(samples).items() for i in own}
    by_rank: dict[int, dict[str, Tensor]] = {rank: {} for rank in range(case.layout.dp)}
    rows, items = [], []
    for index, (gradients, count) in enumerate(_one_by_one(built, batch, samples)):
        rows.append(sketch(gradients))
        items.append(count)
        total = by_rank[owners[index]]
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient.clone()
    if not sum(items):
        return None
    fitted = _fit(torch.stack(rows, dim=1) / sum(items), observed)
    if fitted is None:
        return None
    norms = [_norm(total) * case.layout.dp / sum(items) for total in by_rank.values()]
    return Weights(fitted, items, norms)


def set_state(model: nn.Module, state: Values) -> None:
    """Give a whole model the parameters and buffers of a step of the reference."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["parameter"][name])
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffer"][name])


def loss_terms(built: Built, batch: Any, samples: int) -> Iterator[tuple[Tensor, float]]:
    """Each sample's summed loss alone, in float64, and how many items it counts."""
    model, options = built.model, built.options
    quiet = NoDropout()
    quiet.silence(model)
    module = LossModule(model, built.loss, options.get("forward"), options.get("count"))
    module.double()
    precision = Precision("fp64", torch.device("cpu"))
    for index in range(samples):
        part = move(narrow(batch, samples, index, index + 1), precision.device, torch.float64)
        with quiet, precision.forward():
            term = module(part, module.items(part))
        yield term.total, float(term.count)


def _one_by_one(
    built: Built, batch: Any, samples: int
) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Each sample's gradient of its summed loss, in float64, and how many items it counts."""
    for total, count in loss_terms(built, batch, samples):
        built.model.zero_grad(set_to_none=True)
        total.backward()
        yield _gradients(built.model), count


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def _fit(matrix: Tensor, observed: Tensor) -> list[float] | None:
    """The weights that make ``observed`` of the columns of ``matrix``, where they are unique."""
    if matrix.shape[0] != observed.shape[0] or not bool(observed.isfinite().all()):
        return None
    # Samples that count nothing (all padding) have no gradient, and no weight to find.
    live = matrix.abs().amax(0) > 0
    if not bool(live.any()):
        return None
    columns = matrix[:, live]
    if int(torch.linalg.matrix_rank(columns, rtol=1e-8)) < columns.shape[1]:
        return None
    solution = torch.linalg.lstsq(columns, observed.unsqueeze(1)).solution.squeeze(1)
    left = float((columns @ solution - observed).norm())
    if left > _FITS * max(float(observed.norm()), 1e-12 * float(columns.norm())):
        return None
    weights = torch.ones(matrix.shape[1], dtype=torch.float64)
    weights[live] = solution
    return weights.tolist()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
