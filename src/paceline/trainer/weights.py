"""The weights of a run, given to an engine or to any model."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.checkpoint.best import Mode
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.engine_names import SavedBelow, engine_prefix
from paceline.checkpoint.locate import Which, find_checkpoint
from paceline.checkpoint.rank_state import held_part
from paceline.checkpoint.restore import OpenedCheckpoint, fill, on_all_ranks
from paceline.checkpoint.weights.deepspeed_zero import ZeroWeights, zero_folder
from paceline.checkpoint.weights.safetensors_weights import SafetensorsWeights, holds_safetensors
from paceline.checkpoint.weights.saved_weights import SavedWeights
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.engine.rank_state import OBJECT as ENGINE
from paceline.errors import CheckpointError, TrainingError
from paceline.options.ema import Weights, check_weights
from paceline.trainer.pretrained import load_pretrained

_SHOWN = 5


def load_weights(
    model: nn.Module | Engine,
    where: str | os.PathLike[str],
    which: Which = "last",
    *,
    strict: bool = True,
    weights: Weights = "model",
    engine: str | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    follow: bool = False,
    key: str | None = None,
    rename: Mapping[str, str] | None = None,
) -> str:
    """Give ``model`` the weights of a checkpoint, and nothing else of it; its path is returned.

        paceline.load_weights(model, "runs/small", which="best")
        paceline.load_weights(engine, "llama-3-8b")  # a Hugging Face folder of safetensors

    Args:
        model: any module, on any device and of any dtype, which it keeps; or an engine. Of an
            engine, and of a model that is spread over ranks, every rank calls it.
        where: a run, a folder of checkpoints or one checkpoint; a path or a URL. Or weights of
            another program on this machine: a ``.safetensors`` file, or a Hugging Face folder with
            one or with an index of several. Each rank then reads the part that it holds alone. Or
            a checkpoint that DeepSpeed wrote with ZeRO: its folder, or that of one tag.
        which: ``"last"``, the newest; ``"best"``, by the metric that the run was told to keep the
            best by; or the number of a step.
        strict: refuse weights that the checkpoint lacks or the model does not have. Without it
            those are left as they are. Shapes have to agree either way.
        weights: ``"ema"`` for the averaged weights (``ema=``) of the checkpoint. An engine that
            keeps an average takes over the checkpoint's in any case.
        engine: whose, where the checkpoint holds several engines: its name there.
        metric: another metric for ``"best"``.
        mode: with ``metric``, whether ``"min"`` or ``"max"`` is better.
        follow: go where the run's config says that its checkpoints are, also to other hosts.
        key: take only what was written with this key, ``env:NAME`` or ``file:/path``.
        rename: of safetensors files, what their names become, by regular expressions, such as
            ``{r"^transformer\\.": "backbone."}``. The names of layers in adapters of peft are found
            without.

    Every byte is checked before it counts. Where this raises, a module is as it was; an engine's
    weights may be half loaded only if the checkpoint was found to be damaged on the way.
    """
    _check_arguments(model, where, which, strict, weights)
    zero = None if holds_safetensors(where) else zero_folder(where)
    if zero is not None or holds_safetensors(where):
        kind = "safetensors files" if zero is None else "a checkpoint of DeepSpeed's"
        if key is not None:
            raise CheckpointError(
                f"load_weights: {os.fspath(where)} holds {kind}, which have no key; "
                f"with key={key!r} only checkpoints that were written with it are taken. Import "
                "them first (paceline checkpoint import --key), or leave the key out."
            )
        if weights != "model" or engine is not None:
            raise CheckpointError(
                f"load_weights: {os.fspath(where)} holds {kind}, which have neither "
                "averaged weights nor engines. Leave weights= and engine= out."
            )
        target = model if isinstance(model, Engine) else _unwrapped(model)
        kind_of_files = SafetensorsWeights if zero is None else ZeroWeights
        files = functools.partial(kind_of_files, zero or where)
        return load_pretrained(target, files, strict=strict, rename=rename)
    if rename is not None:
        raise TrainingError(
            f"load_weights: rename= is for safetensors files, and {os.fspath(where)} is not one, "
            "nor a folder of them."
        )
    find = functools.partial(
        find_checkpoint, where, which, metric=metric, mode=mode, follow=follow, key=key
    )
    if isinstance(model, Engine):
        checkpoint = on_all_ranks(find)
        # The names are known to be there, averaged weights included, before anything is loaded.
        on_all_ranks(lambda: SavedWeights(checkpoint, weights, engine))
        about = engine_prefix(checkpoint, engine) + ENGINE
        opened = on_all_ranks(lambda: OpenedCheckpoint(checkpoint, lambda name: name == about))
        saved = SavedBelow(opened, engine or "")
        load = saved.load_by(functools.partial(fill, model.world, checkpoint))
        internals_of(model).rank_state.take(
            saved, load, weights_only=True, strict=strict, weights=weights
        )
    else:
        checkpoint = find()
        _load(_unwrapped(model), SavedWeights(checkpoint, weights, engine), strict)
    return checkpoint.path


def _check_arguments(model: Any, where: Any, which: Any, strict: Any, weights: Any) -> None:
    how = "Call load_weights(model, run), with a torch.nn.Module or a paceline.Engine first."
    if isinstance(model, str | Path):
        raise TrainingError(
            f"load_weights: {os.fspath(model)!r} stands where the model goes. {how}"
        )
    if isinstance(model, type):
        raise TrainingError(f"load_weights: {model.__name__} is a class; make one, and pass that.")
    if not isinstance(model, nn.Module | Engine):
        hint = " Pass its model, or its engine." if hasattr(model, "fit") else ""
        raise TrainingError(f"load_weights: model is a {type(model).__name__}.{hint} {how}")
    if not isinstance(where, str | os.PathLike) or not os.fspath(where):
        raise TrainingError(
            f"load_weights: where={where!r} must be the path or URL of a run, a folder of "
            "checkpoints or one checkpoint."
        )
    is_step = isinstance(which, int) and not isinstance(which, bool) and which >= 0
    if not is_step and which not in ("best", "last"):
        raise TrainingError(
            f"load_weights: which={which!r} must be one of last, best, or the number of a step."
        )
    if not isinstance(strict, bool):
        raise TrainingError(f"load_weights: strict={strict!r} must be True or False.")
    check_weights(weights, "load_weights")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose names are those that were saved."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner  # what torch.compile gave
        else:
            return model


@dataclass(frozen=True)
class _Match:
    """Which saved tensor goes where: by the name in the model, its name in the checkpoint."""

    sources: dict[str, str]
    missing: list[str]
    unknown: list[str]
    misshapen: list[str]


def _load(model: nn.Module, saved: SavedWeights, strict: bool) -> None:
    checkpoint = saved.checkpoint
    state = model.state_dict(keep_vars=True)
    targets = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if on_meta := [name for name, tensor in targets.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{on_meta[0]!r} is on the meta device: there is no memory to load into. Give the "
            "model memory first: model.to_empty(device=…)."
        )
    saved_extra = saved.extra()
    own_extra = [name for name in state if name not in targets]
    match = _matched(targets, saved)
    match.missing.extend(name for name in own_extra if name not in saved_extra)
    match.unknown.extend(name for name in saved_extra if name not in own_extra)
    _check(match, checkpoint, strict)
    read: dict[str, Tensor] = {}
    with checkpoint.kept_open():
        for source in dict.fromkeys(match.sources.values()):
            read[source] = checkpoint.read_tensor(saved.keys[source])
    _check_ties(targets, match.sources, read, checkpoint)
    with torch.no_grad():
        for name, source in match.sources.items():
            for piece in held_part(targets[name]).pieces:
                piece.tensor.copy_(read[source][piece.box.slices()])
    if extra := {name: saved_extra[name] for name in own_extra if name in saved_extra}:
        model.load_state_dict(extra, strict=False)


def _matched(targets: dict[str, Tensor], saved: SavedWeights) -> _Match:
    entries = saved.checkpoint.manifest.tensors
    there = {name: entries[key] for name, key in saved.keys.items()}
    aliases = saved.aliases()
    names_of: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names_of.setdefault(id(tensor), []).append(name)
    match = _Match({}, [], [], [])
    for name, tensor in targets.items():
        known = [name, *names_of[id(tensor)]]  # a tied weight may have been saved under another
        candidates = [c for n in known for c in (n, aliases.get(n)) if c is not None]
        source = next((c for c in candidates if c in there), None)
        if source is None:
            match.missing.append(name)
        elif there[source].shape != tuple(tensor.shape):
            there_shape, here = list(there[source].shape), list(tensor.shape)
            match.misshapen.append(f"{name} has shape {there_shape} there and {here} here")
        else:
            match.sources[name] = source
    used = {*match.sources.values(), *targets, *aliases}
    match.unknown.extend(sorted(there.keys() - used))
    return match


def _check(match: _Match, checkpoint: Checkpoint, strict: bool) -> None:
    problems = list(match.misshapen[:_SHOWN])
    if strict and match.unknown:
        problems.insert(0, f"the model has no {_some(match.unknown)}")
    if (strict or not match.sources) and match.missing:
        problems.insert(0, f"it lacks {_some(match.missing)}")
    if not problems:
        return
    advice = _prefix_hint(match)
    if not match.misshapen and match.sources:
        advice += " With strict=False what has no counterpart is left as it is."
    raise CheckpointError(
        f"{checkpoint.path} does not fit this model: {'; '.join(problems)}.{advice}"
    )


def _prefix_hint(match: _Match) -> str:
    """Where the names differ by what comes before them, say what that is."""
    if not match.missing or not match.unknown:
        return ""
    for name in match.unknown:
        if name.endswith(f".{match.missing[0]}"):
            part = name.removesuffix(f".{match.missing[0]}")
            return f" The names there begin with {part!r}: load them into the model that has it."
    for name in match.missing:
        if name.endswith(f".{match.unknown[0]}"):
            part = name.removesuffix(f".{match.unknown[0]}")
            return f" The names here begin with {part!r}: load them into model.{part}."
    return ""


def _check_ties(
    targets: dict[str, Tensor],
    sources: dict[str, str],
    read: dict[str, Tensor],
    checkpoint: Checkpoint,
) -> None:
    """Refuse to give one tensor two values: the model ties what was saved as two."""
    first: dict[int, str] = {}
    for name, source in sources.items():
        known = first.setdefault(id(targets[name]), name)
        if sources[known] != source and not torch.equal(read[sources[known]], read[source]):
            raise CheckpointError(
                f"{checkpoint.path} holds different values for {known} and {name}, which are one "
                "tensor in this model."
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
