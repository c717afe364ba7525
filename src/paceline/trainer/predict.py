"""A pass over data for the model's outputs: every sample once, in order, on any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.restore import first_problem
from paceline.data import Loader
from paceline.engine import Engine
from paceline.engine.evaluation import predict_batch
from paceline.engine.internals import internals_of
from paceline.engine.loss import Prediction
from paceline.engine.predicted_rows import Rows, Take, joined, rows_of, to_host
from paceline.errors import DataError, TrainingError
from paceline.options.ema import Weights
from paceline.trainer.evaluate import run_pass
from paceline.trainer.pass_progress import PassProgress
from paceline.trainer.prediction_files import PredictionFile, open_predictions
from paceline.trainer.stop_requests import LEAVE, STOP, Interrupted, StopRequests
from paceline.world import collectives


def check_order(loader: Loader) -> None:
    """Refuse data that does not come once and in order: outputs could not be told apart."""
    if loader.state_dict().get("shuffle"):
        raise DataError(
            "predict: this loader shuffles, so that nobody could tell which output belongs to "
            "which sample. Pass the dataset itself, or a loader with shuffle=False."
        )
    if loader.drops_last:
        raise DataError(
            "predict: this loader leaves out a last batch that is short (drop_last). Pass the "
            "dataset itself, or a loader with drop_last=False."
        )
    if loader.is_sharded_by_rank:
        raise DataError(
            "predict: a stream that gives each rank samples of its own (sharded_by_rank) has no "
            "order over all of them. Predict on one rank, or pass data that every rank can read."
        )


class PredictionPass:
    """Gathers what the ranks predict of each batch, and keeps it or writes it as it comes."""

    def __init__(
        self,
        engine: Engine,
        stops: StopRequests,
        *,
        take: Take = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        out: Path | None = None,
    ) -> None:
        self._engine, self._stops = engine, stops
        self._take, self._prediction = take, Prediction(forward)
        self.weights: Weights = "model"
        self._out = out
        self._file: PredictionFile | None = None
        self._kept: list[Rows] = []
        self._problem: str | None = None
        # Which rank has which slice of a batch: the slices are those of the data-parallel ranks.
        self._slice_of = [engine.layout.coordinate(r).dp for r in range(engine.world.size)]

    def run(self, loader: Loader, progress: PassProgress) -> Rows | None:
        """All rows, where they are kept; else ``None``, and they are in the file. A collective."""

        def between() -> None:
            agreed = self._stops.agree()
            if agreed >= LEAVE:
                raise Interrupted
            if agreed == STOP:
                self._raise_together()
            progress.batch_done()

        try:
            self._open()
            progress.begin()
            run_pass(
                self._engine,
                loader,
                self._predict,
                between=between,
                phase="prediction",
                weights=self.weights,
            )
            self._finish()
            progress.end()
        except BaseException:
            if self._file is not None:
                self._file.discard()
            raise
        return joined(self._kept) if self._out is None else None

    def _open(self) -> None:
        with self._noting_problems():
            if self._out is not None and self._engine.world.is_main:
                self._file = open_predictions(self._out)
        self._raise_together()

    def _predict(self, batch: Any) -> None:
        own: list[Rows] | None = None
        outputs = predict_batch(internals_of(self._engine).context, batch, self._prediction)
        with self._noting_problems():
            if outputs is not None:
                own = [to_host(rows_of(out, samples, self._take)) for out, samples in outputs]
        if self._out is None:
            self._kept += self._in_order(collectives.all_gather_object(own))
        else:
            gathered = collectives.gather_object(own, dst=0)
            with self._noting_problems():
                for rows in [] if gathered is None else self._in_order(gathered):
                    assert self._file is not None
                    self._file.add(rows)
        if self._problem is not None:
            self._stops.ask(STOP)

    def _in_order(self, everyone: list[list[Rows] | None]) -> list[Rows]:
        found = [(self._slice_of[rank], own) for rank, own in enumerate(everyone) if own]
        return [rows for _, own in sorted(found, key=lambda each: each[0]) for rows in own]

    def _finish(self) -> None:
        with self._noting_problems():
            if self._file is not None:
                self._file.finish()
        self._raise_together()

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        """One rank fails alone here, and the others wait for it: it tells them first."""
        try:
            yield
        except TrainingError as error:
            self._problem = str(error)
        except OSError as error:
            self._problem = (
                f"predictions cannot be written to {self._out}: {error.strerror or error}. Make "
                "room, or name another file."
            )

    def _raise_together(self) -> None:
        """Raise on every rank what went wrong on any. A collective."""
        problem = first_problem(self._problem)
        if problem is not None:
            raise TrainingError(problem)
