"""Layers that an adapter of peft wraps, as a tensor-parallel plan for the layer itself sees them.

A LoRA layer adds ``lora_B(lora_A(x))`` to its ``base_layer(x)``: the output of both must be split
alike. peft is not imported: a layer is known by the names of its parts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import nn

Place = Literal["layer", "lora_A", "lora_B", "other"]

_LORA_PARTS = {"base_layer", "lora_A", "lora_B", "lora_dropout"}
_COPIES = {"original_module", "modules_to_save"}


class AdaptedLayer(NamedTuple):
    """The layer that a module belongs to, and what it is in it."""

    name: str
    place: Place


def adapted_layer(model: nn.Module, name: str) -> AdaptedLayer:
    """The layer, as it was called before adapters came, that the module ``name`` is a part of.

    A module without adapters is the layer itself.
    """
    steps = name.split(".")
    for number, step in enumerate(steps):
        above = ".".join(steps[:number])
        parts = model.get_submodule(above)._modules
        if step in _COPIES and parts.keys() >= _COPIES:
            return AdaptedLayer(above, "layer")
        if "base_layer" in parts:
            return AdaptedLayer(above, _place(model.get_submodule(above), step))
    return AdaptedLayer(name, "layer")


def _place(wrapper: nn.Module, step: str) -> Place:
    used = {
        name
        for name, module in wrapper._modules.items()
        if module is not None and any(True for _ in module.parameters())
    }
    if used - _LORA_PARTS or getattr(wrapper, "lora_variant", None):
        return "other"  # DoRA, IA3 and the like compute with the weight of the layer itself
    if step == "base_layer":
        return "layer"
    return step if step in ("lora_A", "lora_B") else "other"  # type: ignore[return-value]


def role_in_adapter(role: str, place: Place) -> str:
    """What a part of a LoRA layer does, so that its outputs are split as those of its layer are."""
    if place == "layer":
        return role
    if role == "row":
        return "row" if place == "lora_A" else "replicate"
    splits_output = role == "column" or role.startswith("packed:")
    return role if splits_output and place == "lora_B" else "replicate"
