"""Weights of other programs, from their files straight into a model on its layout.

Of safetensors files each rank reads the elements that it holds, and no others.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from paceline.checkpoint.manifest import Manifest, TensorEntry
from paceline.checkpoint.rank_state import Part, held_part
from paceline.checkpoint.restore import on_all_ranks
from paceline.checkpoint.weights.deepspeed_zero import ZeroWeights
from paceline.checkpoint.weights.safetensors_weights import SafetensorsWeights
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.engine.rank_state import MODEL, dtype_name
from paceline.engine.whole_model import WholeModel
from paceline.errors import CheckpointError, TrainingError

_SHOWN = 5
Stored: TypeAlias = SafetensorsWeights | ZeroWeights


def load_pretrained(
    model: nn.Module | Engine,
    open_weights: Callable[[], Stored],
    *,
    strict: bool,
    rename: Mapping[str, str] | None,
) -> str:
    """Give ``model`` the weights in files of another program; see ``load_weights``."""
    if isinstance(model, Engine):
        stored = on_all_ranks(open_weights)
        rank_state = internals_of(model).rank_state
        sources = _sources(stored, rank_state.whole, strict, rename)
        saved = _Saved(stored, sources)
        rank_state.take(saved, saved.fill, weights_only=True, strict=False)
    else:
        stored = open_weights()
        _load_module(model, stored, _sources(stored, WholeModel(model), strict, rename))
    return stored.where


def _load_module(model: nn.Module, stored: Stored, sources: Mapping[str, str]) -> None:
    state = model.state_dict(keep_vars=True)
    targets = {name: state[name] for name in sources}
    if on_meta := [name for name, tensor in targets.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{on_meta[0]!r} is on the meta device: there is no memory to load into. Give the "
            "model memory first: model.to_empty(device=…)."
        )
    for name, source in sources.items():
        there, here = tuple(stored.weights[source].shape), tuple(targets[name].shape)
        if there != here:
            raise CheckpointError(
                f"{stored.where} does not fit this model: {name} has shape {list(there)} there and "
                f"{list(here)} here."
            )
    _fill(stored, {name: held_part(target) for name, target in targets.items()}, sources)


@torch.no_grad()
def _fill(stored: Stored, parts: Mapping[str, Part], sources: Mapping[str, str]) -> None:
    with stored.kept_open():
        for name, part in parts.items():
            for piece in part.pieces:
                if piece.box.size:
                    piece.tensor.copy_(stored.read(sources[name], piece.box))


@dataclass
class _Saved:
    """The files in the form of a checkpoint, with the names of the model."""

    stored: Stored
    sources: Mapping[str, str]

    @property
    def manifest(self) -> Manifest:
        entries = {}
        for name, source in self.sources.items():
            weight = self.stored.weights[source]
            entries[MODEL + name] = TensorEntry(tuple(weight.shape), dtype_name(weight.dtype), ())
        return Manifest(step=0, tensors=entries)

    def read_object(self, name: str) -> Any:
        raise KeyError(name)  # there are none

    def fill(self, parts: dict[str, Part]) -> None:
        by_name = {MODEL + name: source for name, source in self.sources.items()}
        on_all_ranks(lambda: (_fill(self.stored, parts, by_name), True))


def _sources(
    stored: Stored, whole: WholeModel, strict: bool, rename: Mapping[str, str] | None
) -> dict[str, str]:
    """By name in the model: the name in the files. Refuses, or reports, what has no counterpart."""
    there = _renamed(stored, rename)
    others: dict[str, list[str]] = {}
    for alias, first in whole.aliases.items():
        others.setdefault(first, []).append(alias)
    sources: dict[str, str] = {}
    missing: list[str] = []
    used: set[str] = set()
    for name in (*whole.parameters, *whole.buffers):
        known = [name, *others.get(name, ())]
        plain = [whole.before_adapters.get(one, one) for one in known]
        candidates = [one for one in (*known, *plain) if one is not None]
        source = next((one for one in candidates if one in there), None)
        used.update(one for one in candidates if one in there)
        if source is not None:
            sources[name] = there[source]
        elif None not in plain:  # an adapter is not expected there
            missing.append(name)
    unknown = sorted(there.keys() - used)
    told = [f"the files lack {_some(missing)}"] if missing else []
    told += [f"the model has no {_some(unknown)}"] if unknown else []
    if told and (strict or not sources):
        advice = "With strict=False what has no counterpart is left as it is" if sources else ""
        advice += "; " if advice else ""
        raise CheckpointError(
            f"{stored.where} does not fit this model: {'; '.join(told)}. {advice}rename={{…}} maps "
            "names in the files to the model's, by regular expressions."
        )
    if told:
        warnings.warn(
            f"{stored.where}: {'; '.join(told)}. These are left as they are.", stacklevel=4
        )
    return sources


def _renamed(stored: Stored, rename: Mapping[str, str] | None) -> dict[str, str]:
    """By name as the model is to know it: the name in the files."""
    found: dict[str, str] = {}
    for name in stored.weights:
        new = name
        for pattern, instead in (rename or {}).items():
            try:
                new = re.sub(pattern, instead, new)
            except (re.error, TypeError) as error:
                raise TrainingError(
                    f"load_weights: rename={{{pattern!r}: {instead!r}}} must be regular "
                    f"expressions and what to put in their place: {error}."
                ) from None
        if new in found:
            raise TrainingError(
                f"load_weights: rename= makes {found[new]!r} and {name!r} both {new!r}."
            )
        found[new] = name
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
