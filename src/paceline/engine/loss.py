"""From a model and a batch to a loss that can be added up over microbatches and ranks.

Whatever a user's loss looks like, it becomes a ``Term``: a sum over some items, and how many
items that was. The mean over the global batch is then the sum of the sums over the sum of the
counts, whatever way the batch was cut.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.engine.arguments import check_call
from paceline.engine.batch import batch_size
from paceline.errors import DataError, LossError
from paceline.log_values import log
from paceline.parallel.device_map.moves import device_of, moved
from paceline.parallel.loss_term import Term

LossFunction = Callable[..., Any]
IGNORED_LABEL = -100  # torch's and Hugging Face's mark for a label that is padding


class LossModule(nn.Module):
    """Model and loss as one module: ``forward(microbatch)`` gives a ``Term``.

    It is what the parallel wrappers wrap, so that a rank without samples can take part in a step
    (see ``nothing``) and so that what leaves the wrapper is the loss itself.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        count: Callable[[Any], int | Tensor] | None = None,
    ) -> None:
        super().__init__()
        if loss is not None and forward is not None:
            raise LossError(
                "both loss= and forward= are given. Pass loss=f, called as f(output, target), or "
                "forward=f, called as f(model, batch) and returning the loss: not both."
            )
        self.model = model
        self.loss = _summing(loss) if loss is not None else None
        self.custom_forward = forward
        self.custom_count = count
        self.moves_target = False  # to where the output is, under a device map
        self.prediction: Prediction | None = None  # set while outputs alone are wanted

    @contextlib.contextmanager
    def predicting(self, prediction: Prediction) -> Iterator[None]:
        """The forward pass gives the model's output alone: no loss, and no target is needed."""
        self.prediction = prediction
        try:
            yield
        finally:
            self.prediction = None

    @property
    def _takes_all_keys(self) -> bool:
        """Whether the model computes its own loss, and so is called with the whole batch."""
        return self.loss is None and self.custom_forward is None

    def forward(self, batch: Any, items: int) -> Term:
        """The loss of one microbatch, whose mean, if it is one, runs over ``items`` items.

        With no items the batch is not looked at: see ``nothing``.
        """
        if items == 0:
            return self.nothing()
        if self.prediction is not None:
            output = self.prediction.call(self.model, batch, all_keys=self._takes_all_keys)
            return Term(torch.zeros((), device=device_of(output)), 0, output)
        if self.custom_forward is not None:
            output = None
            value = self.custom_forward(self.model, batch)
        else:
            output = call_model(self.model, batch, all_keys=self.loss is None)
            value = own_loss(output) if self.loss is None else self._compare(output, batch)
        if isinstance(value, Mapping):
            value = _with_parts_logged(value, items)
        if isinstance(value, tuple) and len(value) == 2:
            total, count = value
            _check_scalar(total)
            _check_count(count)
            count = count.detach().reshape(()) if isinstance(count, Tensor) else count
            return Term(total.reshape(()), count, output)
        _check_scalar(value)
        return Term(value.reshape(()) * items, items, output)

    def _compare(self, output: Any, batch: Any) -> Any:
        assert self.loss is not None
        target, device = target_of(batch), device_of(output)
        if self.moves_target and device is not None:
            target = moved(target, device)
        return self.loss(output, target)

    def nothing(self) -> Term:
        """The term of a microbatch without samples: zero, with zero gradients, touching no data."""
        first = next(p for p in self.model.parameters() if p.requires_grad)
        # The sum over no elements: zero even where the parameter holds NaN or Inf.
        return Term(first.flatten()[:0].sum(), 0, None)

    def samples(self, batch: Any) -> int:
        """How many samples ``batch`` holds; what ``count`` says where the batch does not tell."""
        try:
            return batch_size(batch)
        except DataError:
            if self.custom_count is None:
                raise
            return int(self.custom_count(batch))

    def items(self, batch: Any) -> int:
        """Over how many items the loss of ``batch`` is a mean, unless it returns a count itself.

        These are the samples, or, for a Hugging Face model that computes its own loss, the labels
        that are not padding. Called before the batch goes to its device, so that it costs no wait.
        """
        if self.prediction is not None:
            return self.samples(batch)
        if self.custom_count is not None:
            return int(self.custom_count(batch))
        if self._takes_all_keys:
            labels = _labels_seen_by(self.model, batch)
            if labels is not None:
                return int((labels != IGNORED_LABEL).sum())
        return batch_size(batch)


def call_model(model: nn.Module, batch: Any, *, all_keys: bool) -> Any:
    """Call ``model`` the way its batch suggests.

    A mapping becomes keyword arguments: all of them when the model computes its own loss,
    otherwise those that ``forward`` names. Of a tuple or list, everything goes in when the model
    computes its own loss, otherwise all but the last, which is the target. Anything else is the
    one argument.
    """
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        names = None if all_keys else _forward_names(model)
        named = {k: v for k, v in batch.items() if names is None or k in names}
    elif isinstance(batch, tuple | list):
        arguments = list(batch if all_keys or len(batch) == 1 else batch[:-1])
    else:
        arguments = [batch]
    try:
        return model(*arguments, **named)
    except TypeError:
        # Looked at only now, so that a step pays nothing for it.
        check_call(model.forward, arguments, named)
        raise


@dataclass(frozen=True)
class Prediction:
    """How a model is called for its output alone.

    ``forward(model, batch)`` does it where one is given. Else the model is called as in training,
    but a tuple without a target goes in whole: where the model cannot be called without its last
    item, and can with it.
    """

    forward: Callable[[nn.Module, Any], Any] | None = None

    def call(self, model: nn.Module, batch: Any, *, all_keys: bool) -> Any:
        """The output for ``batch``; ``all_keys``: all of it goes into the model in training."""
        if self.forward is not None:
            return self.forward(model, batch)
        if isinstance(batch, tuple | list) and not all_keys and len(batch) > 1:
            takes = inspect.signature(model.forward)
            all_keys = not _binds(takes, batch[:-1]) and _binds(takes, batch)
        return call_model(model, batch, all_keys=all_keys)


def _binds(takes: inspect.Signature, arguments: Sequence[Any]) -> bool:
    try:
        takes.bind(*arguments)
    except TypeError:
        return False
    return True


def target_of(batch: Any) -> Any:
    """What a loss function compares the output with: the last of a tuple, else the whole batch."""
    return batch[-1] if isinstance(batch, tuple | list) else batch


def own_loss(output: Any) -> Any:
    """The loss in the output of a model that computes its own."""
    if isinstance(output, Tensor):
        if output.numel() != 1:
            raise LossError(
                f"no loss function was given, so the model's output is taken for the loss, and it "
                f"has shape {tuple(output.shape)}. Pass loss=, or return one number from the model."
            )
        return output
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        if len(output) == 2 and _is_number(output[1]):
            return output
        if output and isinstance(output[0], Tensor) and _is_number(output[0]):
            return output[0]  # (loss, logits, ...)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise LossError(
            f"no loss function was given, and the model's output ({type(output).__name__}) holds "
            "no loss. Pass loss=, or return the loss from the model (a scalar, a (sum, count) "
            "pair, or an output with .loss; Hugging Face models do so when the batch has 'labels')."
        )
    return found


def _with_parts_logged(parts: Mapping[str, Any], items: int) -> Any:
    """The ``loss`` among the parts that a loss function returned; the others are logged."""
    if "loss" not in parts:
        raise LossError(
            f"the loss is a dict of {', '.join(map(str, parts)) or 'nothing'}, without 'loss'. "
            "Return the value to train under 'loss'; the other parts are reported beside it."
        )
    trained = parts["loss"]
    is_pair = isinstance(trained, tuple) and len(trained) == 2
    over = trained[1] if is_pair else items
    for name, value in parts.items():
        if name == "loss":
            continue
        if isinstance(value, tuple) and len(value) == 2:
            total, count = value
            log(str(name), total / _at_least_one(count), count=count)
        else:
            log(str(name), value, count=over)
    return trained


def _at_least_one(count: Any) -> Any:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


class _SumAndCount(nn.Module):
    """A loss that returns ``(sum, count)``, made from one of torch's that returns the mean.

    A module, so that class weights go where the model goes.
    """

    def __init__(self, loss: LossFunction, count: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss, self.count = loss, count

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(output, target), self.count(output, target)


def _summing(loss: LossFunction) -> LossFunction:
    """``loss``; where torch says what its mean runs over, in the form that returns sum and count.

    Cross-entropy leaves out ignored targets and may weight classes: its mean over a microbatch is
    not a mean over samples, so the true mean over the global batch needs the sums and the counts.
    """
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):  # KLDivLoss's own word for a mean over samples
        raise LossError(
            f"{type(loss).__name__}(reduction={reduction!r}) cannot be averaged over the global "
            "batch: its count is unknown. Use reduction='mean', or a function that returns "
            "(sum, count)."
        )
    if loss in (F.cross_entropy, F.nll_loss):
        return _SumAndCount(
            functools.partial(loss, reduction="sum"),
            functools.partial(_targets, weight=None, ignored=IGNORED_LABEL),
        )
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        summed: Any = copy.copy(loss)
        summed.reduction = "sum"

        def count(output: Tensor, target: Tensor) -> Tensor:
            return _targets(output, target, weight=summed.weight, ignored=summed.ignore_index)

        return _SumAndCount(summed, count)
    return loss


def _targets(output: Tensor, target: Tensor, *, weight: Tensor | None, ignored: int) -> Tensor:
    """What cross-entropy's mean divides by: kept targets, or the weights of their classes."""
    if target.is_floating_point():  # class probabilities: one per position, none ignored
        return torch.tensor(target.numel() // max(output.shape[-1 if output.ndim == 1 else 1], 1))
    kept = target != ignored
    if weight is None:
        return kept.sum()
    return weight.to(target.device)[target.masked_fill(~kept, 0)].mul(kept).sum()


def _labels_seen_by(model: nn.Module, batch: Any) -> Tensor | None:
    """The labels over which a Hugging Face model averages its own loss, if that is what it is."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not hasattr(model, "config"):
        return None
    # A causal model predicts each label from the position before it, so the first is never used.
    # Transformers names the kind of loss in `loss_type`; None means its default, which is causal.
    kind = getattr(model, "loss_type", None)
    causal = kind is None or "CausalLM" in str(kind)
    encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    return labels[..., 1:] if causal and not encoder_decoder and labels.ndim > 1 else labels


def _forward_names(model: nn.Module) -> set[str] | None:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _check_count(count: Any) -> None:
    if not _is_number(count):
        found = (
            f"has shape {tuple(count.shape)}"
            if isinstance(count, Tensor)
            else f"is a {type(count).__name__}"
        )
        raise LossError(
            f"the loss is a pair whose second part {found}, but of a pair Paceline expects (sum, "
            "count) with one number each. Return the loss alone, or the sum and its count."
        )


def _check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor):
        raise LossError(
            f"the loss is a {type(value).__name__}, not a tensor. Return a scalar tensor (the "
            "mean over the samples) or a pair (sum, count)."
        )
    if value.ndim > 0 and value.numel() != 1:
        raise LossError(
            f"the loss has shape {tuple(value.shape)}, but one number is needed. Return the mean "
            "over the samples, or a pair (sum, count) for a mean over tokens."
        )
