"""What an engine does with a model besides training it: evaluate and predict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline.engine.evaluation import (
    Evaluated,
    evaluate_batch,
    evaluation_mode,
    predict_share,
)
from paceline.engine.internals import HasInternals
from paceline.engine.loss import Prediction
from paceline.engine.predicted_rows import Rows, Take
from paceline.options.ema import Weights, check_weights


class InferenceEngine(HasInternals):
    """The part of ``paceline.Engine`` that evaluates and predicts, once the last step is over."""

    def settle(self) -> None:
        """Wait for the last step and raise if it was not finite.

        On a GPU ``step`` looks at each step's loss and gradient while the next one runs. Call this
        after the last step, or before using the parameters; ``state_dict`` does. In a round of
        local steps it waits until all replicas are through with the step; every rank must call it.
        """
        self._internals.context.nonfinite.settle()
        self._internals.context.microbatches.logs.settle()
        self._internals.sync.settle()

    @contextlib.contextmanager
    def evaluating(self, weights: Weights = "model") -> Iterator[None]:
        """The model in evaluation mode, with equal buffers on all ranks; put back afterwards.

        With ``weights="ema"`` it has its averaged weights (``ema=``) in the meantime.
        """
        check_weights(weights, "evaluating")
        self.settle()
        with evaluation_mode(self._internals.context, weights):
            yield

    def evaluate(self, batch: Any) -> list[Evaluated]:
        """This rank's share of an evaluation batch through the model, microbatch by microbatch.

        To be called inside ``evaluating``, by every rank. Of the ranks that share samples, one
        gets the results, and the others none.
        """
        return evaluate_batch(self._internals.context, batch)

    def predict(
        self,
        batch: Any,
        *,
        take: Take = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        weights: Weights | None = None,
    ) -> Rows | None:
        """The model's outputs for ``batch``, this rank's share: a row for each sample, in order.

            with engine.evaluating():  # once for many batches; predict enters it by itself
                for batch in loader:
                    logits = engine.predict(batch)

        A tensor, or a dict of tensors by name where the model returns several; ``None`` where the
        share is empty. No loss is computed and no target is needed: a batch is ``x``, ``(x,)`` or
        ``(x, target)``, or a mapping. Every rank must call it, and ranks that share samples
        (``tp``, ``pp``) all get the rows.

        Args:
            batch: as for ``step``, with or without a target.
            take: what to keep of the output: the name of a part of it, such as ``"logits"``, or a
                function of the output of a microbatch.
            forward: called as ``forward(model, batch)``, it returns the output, where the model is
                not simply called with its batch.
            weights: ``"ema"`` for the averaged weights; by default the model's own, or those of the
                ``evaluating`` around it.
        """
        check_weights(weights, "predict")
        with contextlib.ExitStack() as stack:
            if weights == "ema" or not self._internals.context.is_evaluating:
                stack.enter_context(self.evaluating(weights or "model"))
            return predict_share(self._internals.context, batch, Prediction(forward), take)
