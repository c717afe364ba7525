"""What an engine refuses before it trains, and why."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError, LossError, TrainingError
from paceline.options import Compression, EngineOptions
from paceline.parallel.averaging import sparse_embedding

_NAMES_TOLD = 5
_QUANTISING = ("bitsandbytes", "torchao")


def check_model_and_options(model: nn.Module, options: EngineOptions) -> None:
    """Refuse a model without anything to train, and options that do not suit it."""
    if not any(p.requires_grad for p in model.parameters()):
        asked = options.freeze or options.unfreeze_at
        raise TrainingError(
            f"{type(model).__name__} has no parameter that requires a gradient: nothing to train."
            + (" freeze= and unfreeze_at= leave none at the start: freeze fewer." if asked else "")
        )
    check_not_quantised(model)
    if (sparse := sparse_embedding(model)) is not None:
        _check_rows_can_travel(sparse, options)
    check_rules_match(model, options.compress)


def check_not_quantised(model: nn.Module) -> None:
    """Refuse weights whose meaning lies outside of their bytes, as quantising libraries keep them.

    To copy, cut, save or load the bytes alone would change the model without a word.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        library = type(tensor).__module__.partition(".")[0]
        if library in _QUANTISING:
            raise TrainingError(
                f"{name!r} is a {type(tensor).__name__} of {library}: a quantised weight, whose "
                "scales are kept beside it where no layout and no checkpoint would find them. Load "
                "the model without a quantization_config, in bfloat16 to save memory, and shard it "
                "(zero=3). Layers that keep integers and scales as buffers of their own work."
            )


def _check_rows_can_travel(embedding: str, options: EngineOptions) -> None:
    asked = None
    if options.compress is not None:
        asked, without = "compress", "without compression (compress.format: none)"
    elif options.reduction.hierarchy == "always":
        asked, without = "reduction: hierarchy='always'", "with reduction.hierarchy: auto"
    if asked is not None:
        raise TrainingError(
            f"{asked}: {embedding!r} is an embedding with sparse=True, whose gradient is a list of "
            f"rows already. Build it with sparse=False, or train {without}."
        )


def check_rules_match(model: nn.Module, compress: Compression | str | None) -> None:
    """Refuse a rule whose pattern is the name of no parameter of the whole ``model``."""
    rules = [] if compress is None else Compression.of(compress).rules
    names = [name for name, _ in model.named_parameters()]
    for pattern in rules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise TrainingError(
                f"compress: rules: {pattern!r} matches no parameter of {type(model).__name__}. "
                f"{names_like(pattern, model, names)}"
            )


def rules_on_frozen(model: nn.Module, compress: Compression | str | None) -> list[str]:
    """A sentence on each rule that is for frozen parameters alone, which send no gradients."""
    told = []
    for pattern in [] if compress is None else Compression.of(compress).rules:
        matched = {n: p for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, pattern)}
        if not any(parameter.requires_grad for parameter in matched.values()):
            told.append(
                f"compress: rules: {pattern!r} matches frozen parameters only (such as "
                f"{next(iter(matched))}): it counts for nothing until they are trained"
            )
    return told


def names_like(pattern: str, model: nn.Module, names: list[str]) -> str:
    """Names that may have been meant."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        if fnmatch.fnmatchcase(alias, pattern):
            first = first_names[id(parameter)]
            return f"{alias!r} is the same parameter as {first!r}: name it so."
    near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3)
    if not near:  # a part of the model may have been meant
        steps = [name.split(".") for name in names]
        parts = {".".join(s[:end]) + ".*" for s in steps for end in range(1, len(s))}
        near = difflib.get_close_matches(pattern, sorted(parts), n=3)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    told = ", ".join(names[:_NAMES_TOLD]) + (", …" if len(names) > _NAMES_TOLD else "")
    return f"There are {told}. * stands for any part of a name."


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what is no optimizer, one of another model, and LBFGS."""
    if not isinstance(optimizer, Optimizer):
        raise TrainingError(
            f"optimizer gave a {type(optimizer).__name__}. Pass a torch optimizer, or a function "
            "that makes one from the model's parameters, such as torch.optim.AdamW."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError(
            "LBFGS evaluates the loss several times a step, which Engine.step does not do. Use an "
            "optimizer that needs one gradient a step, such as AdamW or SGD."
        )
    known = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise TrainingError(
            f"{strangers} of the optimizer's parameters do not belong to the model. Make the "
            "optimizer from this model's parameters(), after any change to the model."
        )


def another_model(what: str) -> CheckpointError:
    """The error for a checkpoint that does not fit the model."""
    return CheckpointError(
        f"the saved state is that of another model. {what} Build the model as it was built then, "
        "or start a new run."
    )


def check_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, sizes: list[int] | None = None
) -> None:
    """Refuse the saved state of another kind of optimizer, or of other parameter groups.

    ``sizes``: how many parameters of the whole model each group has, where ranks hold fewer.
    """
    saved, own = state["param_groups"], optimizer.param_groups
    there = [len(group["params"]) for group in saved]
    here = sizes if sizes is not None else [len(group["params"]) for group in own]
    if there != here:
        raise CheckpointError(
            f"the saved optimizer has parameter groups of {there} tensors, this "
            f"{type(optimizer).__name__} of {here}. Group the parameters as they were then, or "
            "start a new run."
        )
    if missing := sorted(set().union(*own) - set().union(*saved)):
        raise CheckpointError(
            f"the saved state is that of another kind of optimizer: {type(optimizer).__name__} "
            f"needs {', '.join(missing)}, which it does not have. Use the optimizer of that run, "
            "or start a new run."
        )


def check_loss_parameters(loss_and_model: nn.Module) -> None:
    """Refuse a loss with trainable parameters of its own: nothing would train or save them."""
    own = [
        name.removeprefix("loss.")
        for name, parameter in loss_and_model.named_parameters()
        if parameter.requires_grad and not name.startswith("model.")
    ]
    if own:
        raise LossError(
            f"the loss has trainable parameters of its own ({', '.join(own[:3])}), which are "
            "neither in the optimizer nor in checkpoints. Make it a part of the model: a module "
            "that holds both and returns the loss needs no loss=."
        )


def check_depends_on_parameters(loss: Tensor) -> None:
    """Refuse a loss that has nothing to differentiate."""
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on any parameter that requires a gradient. Is it computed "
            "from a detached tensor, or under torch.no_grad()?"
        )
