"""Evaluation: a rank's share through the model, microbatch by microbatch, without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from paceline.engine.batch import placeholder
from paceline.engine.context import StepContext
from paceline.engine.loss import Prediction
from paceline.engine.predicted_rows import Rows, Take, joined, on_device, rows_of, to_host
from paceline.errors import TrainingError
from paceline.log_values import recording
from paceline.options.ema import Weights
from paceline.parallel.distributed_model import sample_group
from paceline.parallel.loss_term import Term
from paceline.world.object_collectives import all_gather_object


class Evaluated(NamedTuple):
    """One evaluation microbatch: the batch on its device, its size, its loss and model output."""

    batch: Any
    samples: int
    term: Term


@contextlib.contextmanager
def evaluation_mode(context: StepContext, weights: Weights = "model") -> Iterator[None]:
    """See ``paceline.Engine.evaluating``; the last step has been settled."""
    averaged = contextlib.nullcontext() if weights == "model" else context.kept_average().in_place()
    replica = context.replica
    if replica.is_spread:
        context.sync.sync_buffers()
    modes = [(module, module.training) for module in replica.model.modules()]
    replica.model.eval()
    replica.pulse.pause()
    was_evaluating, context.is_evaluating = context.is_evaluating, True
    context.microbatches.logs.begin_evaluation()
    try:
        with (
            context.sync.shared_model(),
            averaged,
            torch.no_grad(),
            replica.pulse.during("evaluation"),
        ):
            yield
    finally:
        context.is_evaluating = was_evaluating
        context.microbatches.logs.end_evaluation()
        for module, training in modes:
            module.training = training
        if replica.is_spread:
            replica.spread.let_go()


def evaluate_batch(context: StepContext, batch: Any) -> list[Evaluated]:
    """See ``paceline.Engine.evaluate``."""
    context.replica.pulse.beat()
    context.same_batches.check(batch)
    if not context.replica.is_spread:
        context.setup.apply_layout(batch)
    return _evaluate(context, batch)


def predict_batch(
    context: StepContext, batch: Any, prediction: Prediction
) -> list[tuple[Any, int]] | None:
    """The model's outputs for this rank's share, with their numbers of samples.

    They are for the microbatches of the share, in order; the list is empty where the share is. Of
    the ranks that share samples, one gets the outputs and the others ``None``.
    """
    with context.loss.predicting(prediction):
        found = evaluate_batch(context, batch)
    if not context.replica.spread.counts:
        return None
    return [(part.term.output, part.samples) for part in found]


def predict_share(
    context: StepContext, batch: Any, prediction: Prediction, take: Take
) -> Rows | None:
    """See ``paceline.Engine.predict``: the rows of a share, on all its ranks."""
    found, failure = None, None
    try:
        outputs = predict_batch(context, batch, prediction)
        if outputs:
            found = joined([rows_of(output, samples, take) for output, samples in outputs])
    except TrainingError as error:
        failure = error
    replica = context.replica
    group = sample_group(replica.world, replica.layout)
    if group.size == 1:
        if failure is not None:
            raise failure
        return found
    own = None if found is None else to_host(found)
    told = all_gather_object((own, None if failure is None else str(failure)), group)
    for _, problem in told:
        if problem is not None:
            raise failure or TrainingError(problem)
    rows = next((rows for rows, _ in told if rows is not None), None)
    return None if rows is None else on_device(rows, replica.device)


@torch.no_grad()
def _evaluate(context: StepContext, batch: Any) -> list[Evaluated]:
    spread = context.replica.spread
    parts = context.microbatches.of_evaluation(batch)
    if spread.pipeline is not None:
        found = spread.pipeline.evaluate(parts, context.loss.prediction)
        terms = [None if term is None else spread.plain(term) for term in found]
    else:
        terms = [_evaluate_part(context, part, items) for part, items in parts]
    if not spread.counts or not context.loss.samples(batch):
        return []
    results = []
    cut = context.microbatches.cut(batch)
    for part, (moved, items), term in zip(cut, parts, terms, strict=False):
        assert term is not None
        # Nothing but padding: metrics want the output, the loss is 0/0.
        kept = term if items else Term(torch.zeros(()), 0, term.output)
        results.append(Evaluated(moved, context.loss.samples(part), kept))
    return results


def _evaluate_part(context: StepContext, part: Any, items: int) -> Term | None:
    spread = context.replica.spread
    samples = context.loss.samples(part)
    if not samples:
        if not spread.lockstep:
            return None
        part, samples = placeholder(part), 1
    logs = context.microbatches.logs if items and context.loss.prediction is None else None
    with context.microbatches.drawing(part, samples), recording(logs, items):
        if spread.lockstep:  # through the module that gathers parameters
            return spread.plain(spread(part, items or 1))
        with spread.context():
            term: Term = context.loss(part, items or 1)
        return spread.plain(term)
