"""Evaluation: a rank's share through the model, microbatch by microbatch, without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from paceline.engine.batch import placeholder
from paceline.engine.context import StepContext
from paceline.parallel.loss_term import Term


class Evaluated(NamedTuple):
    """One evaluation microbatch: the batch on its device, its size, its loss and model output."""

    batch: Any
    samples: int
    term: Term


@contextlib.contextmanager
def evaluation_mode(context: StepContext) -> Iterator[None]:
    """See ``paceline.Engine.evaluating``; the last step has been settled."""
    replica = context.replica
    if replica.is_spread:
        context.sync.sync_buffers()
    modes = [(module, module.training) for module in replica.model.modules()]
    replica.model.eval()
    replica.pulse.pause()
    try:
        with context.sync.shared_model(), torch.no_grad(), replica.pulse.during("evaluation"):
            yield
    finally:
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


@torch.no_grad()
def _evaluate(context: StepContext, batch: Any) -> list[Evaluated]:
    spread = context.replica.spread
    parts = context.microbatches.of_evaluation(batch)
    if spread.pipeline is not None:
        terms = spread.pipeline.evaluate(parts)
    else:
        terms = [_evaluate_part(context, part, items) for part, items in parts]
    if not spread.counts or not context.loss.samples(batch):
        return []
    results = []
    cut = context.microbatches.cut(batch)
    for part, (on_device, items), term in zip(cut, parts, terms, strict=False):
        assert term is not None
        # Nothing but padding: metrics want the output, the loss is 0/0.
        kept = term if items else Term(torch.zeros(()), 0, term.output)
        results.append(Evaluated(on_device, context.loss.samples(part), kept))
    return results


def _evaluate_part(context: StepContext, part: Any, items: int) -> Term | None:
    spread = context.replica.spread
    samples = context.loss.samples(part)
    if not samples:
        if not spread.lockstep:
            return None
        part, samples = placeholder(part), 1
    with context.microbatches.drawing(part, samples):
        if spread.lockstep:  # through the module that gathers parameters
            return spread.plain(spread(part, items or 1))
        with spread.context():
            term: Term = context.loss(part, items or 1)
        return spread.plain(term)
