"""The tensor-parallel plan that a Hugging Face model carries, in Paceline's words.

Such a model says of its attention and feed-forward layers which are split by columns and which by
rows (``tp_plan``). Its heads are computed by ``attention.py``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.parallel.tensor.adapters import adapted_layer, role_in_adapter
from paceline.parallel.tensor.splittable import (
    kind_of,
    splittable_modules,
    why_not_divided,
    why_not_split,
)

# Hugging Face's words, and ours.
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "embedding_rowwise": "vocabulary",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate",
    "packed_colwise": "packed:2",
}


_BESIDE_SPLIT = "the other half of its adapter is split"


def own_plan(model: nn.Module) -> dict[str, str]:
    """A Hugging Face model's own plan, with names from the model's root; empty without one."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) and hasattr(model, "config") else {}


def translated(
    model: Any, own: Mapping[str, str], vocabulary: bool, tp: int
) -> tuple[dict[str, str], dict[str, str]]:
    """The model's plan in our words; styles we have no word for stay whole, and say so."""
    roles: dict[str, str] = {}
    reasons: dict[str, str] = {}
    prefix = _where_names_begin(model)
    names = splittable_modules(model)
    # One layer of an attention that stays whole would meet others that are split.
    others = any(adapted_layer(model, name).place == "other" for name in names)
    for name in names:
        module = model.get_submodule(name)
        kind = kind_of(module)
        if kind in ("attention", "experts"):
            why = why_not_divided(kind, module, tp)
            roles[name] = "replicate" if why else kind
            if why:
                reasons[name] = why
            continue
        layer, place = adapted_layer(model, name)
        planned = layer.removeprefix(prefix)
        style = next((s for p, s in own.items() if fnmatch.fnmatchcase(planned, p)), None)
        if others:
            reasons[name] = (
                "the model has adapters other than LoRA, which compute with whole layers"
            )
        elif style is None:
            reasons[name] = "the model's own plan does not name it"
        elif style not in _STYLES:
            reasons[name] = f"the model's own plan says {style!r}, which Paceline does not know"
        else:
            roles[name] = role_in_adapter(_STYLES[style], place)
            if roles[name] == "replicate":
                is_adapter = place != "layer"
                reasons[name] = _BESIDE_SPLIT if is_adapter else "the model's own plan says so"
    if vocabulary:
        _split_vocabulary(model, roles, reasons)
    return roles, reasons


def _where_names_begin(model: nn.Module) -> str:
    """The prefix of the model whose plan it is, where a wrapper such as peft's passes it on."""
    for name, module in model.named_modules():
        if hasattr(type(module), "tp_plan") or hasattr(type(module), "_tp_plan"):
            return f"{name}." if name else ""
    return ""


def _split_vocabulary(model: Any, roles: dict[str, str], reasons: dict[str, str]) -> None:
    """Split the embedding and the output layer too, which the model itself points out."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for name, module in model.named_modules():
        at_an_end = any(module is end for end in ends) and why_not_split(module) is None
        if at_an_end and kind_of(module) in ("embedding", "out_first"):
            roles[name] = "vocabulary"
            reasons.pop(name, None)
