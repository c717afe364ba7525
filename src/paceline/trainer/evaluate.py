"""A pass over the validation data, with metrics that are right however the data was cut."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data import Loader
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.engine.loss import target_of
from paceline.errors import DataError, TrainingError
from paceline.options.ema import Weights
from paceline.trainer.pass_progress import PassProgress
from paceline.trainer.stateful_metrics import StatefulMetric, has_state
from paceline.world import collectives, rng_state, set_rng_state

MetricFunction = Callable[[Any, Any], Any]


class WholeSet:
    """A metric that cannot be averaged over batches, such as AUC or F1.

    ``function(outputs, targets)`` is called once, on every rank, with the tensors of all ranks in
    the order of the validation data, on the CPU.
    """

    def __init__(self, function: MetricFunction) -> None:
        self.function = function


Metric = MetricFunction | WholeSet


def evaluate(
    engine: Engine,
    loader: Loader,
    metrics: Mapping[str, Metric],
    *,
    progress: PassProgress | None = None,
    weights: Weights | None = None,
    batches: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], int, float]:
    """Loss and metrics over ``loader`` from its start; also the samples and the seconds.

    Of the model's ``weights`` or of the averaged ones; by default of the model's, and where an
    average is kept also of that, as ``ema/loss`` and so on, in a second pass. ``between`` is called
    by every rank after each batch, and may raise to end the pass. The random streams of training
    are left as they were.
    """
    one_pass = functools.partial(_one_pass, engine, loader, metrics, progress, batches, between)
    values, samples, seconds = one_pass(weights or "model")
    average = internals_of(engine).context.average
    if weights is None and average is not None and average.options.evaluate:
        averaged = values  # until the average begins, it is the model
        if average.has_begun:
            averaged, _, more = one_pass("ema")
            seconds += more
        values = values | {f"ema/{name}": value for name, value in averaged.items()}
    return values, samples, seconds


def _one_pass(
    engine: Engine,
    loader: Loader,
    metrics: Mapping[str, Metric],
    progress: PassProgress | None,
    batches: int | None,
    between: Callable[[], None],
    weights: Weights,
) -> tuple[dict[str, float], int, float]:
    started = time.perf_counter()
    if progress is not None:
        progress.begin()
    tally = _Tally(metrics)
    numbers = itertools.count()

    def visit(batch: Any) -> None:
        index = next(numbers)
        for part in engine.evaluate(batch):
            tally.add(index, part.batch, part.samples, part.term)

    def after() -> None:
        between()
        if progress is not None:
            progress.batch_done()

    run_pass(engine, loader, visit, batches=batches, between=after, weights=weights)
    values, samples = tally.reduce(engine)
    logged = internals_of(engine).context.microbatches.logs.evaluated()
    values |= {name: one.value for name, one in logged.items() if name not in values}
    if samples == 0:
        raise DataError("the validation data gave no samples.")
    return values, samples, time.perf_counter() - started


def run_pass(
    engine: Engine,
    loader: Loader,
    visit: Callable[[Any], None],
    *,
    batches: int | None = None,
    between: Callable[[], None] = lambda: None,
    phase: str = "evaluation",
    weights: Weights = "model",
) -> None:
    """Show ``visit`` the batches of ``loader`` from its start, in evaluation mode; see above."""
    random = rng_state()
    loader.seek(0)
    try:
        with engine.evaluating(weights), engine.world.pulse.during(phase):
            for batch in itertools.islice(iter(loader), batches):
                visit(batch)
                between()
    finally:
        set_rng_state(random)


class _Tally:
    """Sums and counts of this rank, by metric; made into means over all ranks at the end."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.stateful = [StatefulMetric(n, m) for n, m in metrics.items() if has_state(m)]
        metrics = {n: m for n, m in metrics.items() if not has_state(m)}
        self.metrics = metrics
        by_batch = [name for name, m in metrics.items() if not isinstance(m, WholeSet)]
        self.sums = dict.fromkeys(("loss", *by_batch), 0.0)
        self.counts = dict.fromkeys(self.sums, 0.0)
        self.samples = 0
        # (batch, output, target) for the metrics that need everything at once
        self.rows: list[tuple[int, Tensor, Tensor]] = []

    def add(self, index: int, batch: Any, samples: int, term: Any) -> None:
        self.samples += samples
        self.sums["loss"] += float(term.total)
        self.counts["loss"] += float(term.count)
        target = target_of(batch)
        for stateful in self.stateful:
            stateful.update(term.output, target)
        for name, metric in self.metrics.items():
            if isinstance(metric, WholeSet):
                continue
            value = metric(term.output, target)
            if isinstance(value, tuple) and len(value) == 2:
                total, count = _number(name, value[0]), _number(name, value[1])
            else:
                total, count = _number(name, value) * samples, samples
            self.sums[name] += total
            self.counts[name] += count
        if any(isinstance(metric, WholeSet) for metric in self.metrics.values()):
            self.rows.append((index, *_tensors(term.output, target)))

    def reduce(self, engine: Engine) -> tuple[dict[str, float], int]:
        numbers = [*self.sums.values(), *self.counts.values(), float(self.samples)]
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if engine.world.size > 1:
            group = engine.world.everyone.cpu_group
            torch.distributed.all_reduce(tensor, group=group)
        *both, samples = tensor.tolist()
        sums, counts = both[: len(self.sums)], both[len(self.sums) :]
        values = {
            name: total / count if count else float("nan")
            for name, total, count in zip(self.sums, sums, counts, strict=True)
        }
        values |= self._whole_set_values()
        for stateful in self.stateful:
            values |= stateful.compute(engine.world.rank, engine.world.size)
        return values, int(samples)

    def _whole_set_values(self) -> dict[str, float]:
        whole = {n: m for n, m in self.metrics.items() if isinstance(m, WholeSet)}
        if not whole:
            return {}
        everyone = collectives.all_gather_object(self.rows)
        # Each rank kept its slice of every global batch: put the slices back side by side.
        rows = sorted(
            ((row[0], rank, place, row) for rank, own in enumerate(everyone)
             for place, row in enumerate(own)),
            key=lambda entry: entry[:3],
        )  # fmt: skip
        try:
            outputs = torch.cat([row[1] for *_, row in rows])
            targets = torch.cat([row[2] for *_, row in rows])
        except RuntimeError as error:
            raise TrainingError(
                f"WholeSet ({', '.join(whole)}) puts the outputs of all batches into one tensor, "
                f"but their shapes differ: {error}. Pad all batches to one length, or use a metric "
                "function on each batch instead."
            ) from error
        return {n: _number(n, metric.function(outputs, targets)) for n, metric in whole.items()}


def _tensors(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise TrainingError(
            f"WholeSet needs a tensor output and a tensor target, not {type(output).__name__} and "
            f"{type(target).__name__}. Use a metric function on each batch instead."
        )
    return output.detach().cpu(), target.detach().cpu()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TrainingError(
            f"metric {name!r} returned {type(value).__name__}, not one number. Return the mean "
            "over the batch's samples, or a pair (sum, count)."
        ) from None
