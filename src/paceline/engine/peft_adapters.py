"""The adapters that peft put into a model: what each is made of, as it is saved."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from torch import nn


def describe_adapters(model: nn.Module) -> list[dict[str, Any]]:
    """Of each adapter in ``model``: where it is, its config, and its tensors by name in a file.

    peft itself says which tensors belong to an adapter and what they are called in its file. One
    that peft computes from others, such as a prompt, has no entry: only peft can save it. Without
    peft, or without adapters, there is nothing to say.
    """
    peft: Any = sys.modules.get("peft")  # who has made an adapter has imported it
    if peft is None:
        return []
    found = []
    for part, module in model.named_modules():
        if isinstance(module, peft.PeftModel):
            for name, config in module.peft_config.items():
                tensors = _tensors(peft, module, name, f"{part}." if part else "")
                if tensors:
                    told = _config(module, config)
                    found.append({"part": part, "name": name, "config": told, "tensors": tensors})
    return found


def _tensors(peft: Any, module: Any, adapter: str, prefix: str) -> dict[str, str] | None:
    """By name in the adapter's file: the name in the whole model. None: some are in no model."""
    if module.peft_config[adapter].is_prompt_learning:
        return None
    state = module.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    # Without looking up on a hub whether the vocabulary was resized.
    kept = peft.get_peft_model_state_dict(
        module, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    if any(id(tensor) not in names for tensor in kept.values()):
        return None
    return {name: prefix + names[id(tensor)] for name, tensor in kept.items()}


def _config(module: Any, config: Any) -> dict[str, Any]:
    """As peft would write it into ``adapter_config.json``."""
    base = module.get_base_model()
    made = {**config.to_dict(), "inference_mode": True}
    if made.get("base_model_name_or_path") is None:
        made["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
    if made.get("task_type") is None:
        kind = type(base)
        made["auto_mapping"] = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    told: dict[str, Any] = json.loads(json.dumps(made, default=_plain))
    return told


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def names_before_adapters(model: nn.Module) -> dict[str, str | None]:
    """By name of a tensor in a model with adapters: its name before peft came.

    ``None`` for what belongs to an adapter alone. Names that peft left as they were are not listed.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return {}
    own = {name for told in describe_adapters(model) for name in told["tensors"].values()}
    found: dict[str, str | None] = {}
    for part, module in model.named_modules():
        if not isinstance(module, peft.PeftModel):
            continue
        prefix, base = f"{part}." if part else "", module.get_base_model()
        inner = next(f"{name}." for name, one in module.named_modules() if one is base)
        for name in module.state_dict(keep_vars=True):
            copied = _COPIED.sub(".", name)
            if prefix + name in own and copied == name:
                found[prefix + name] = None
            elif name.startswith(inner):
                found[prefix + name] = prefix + copied.removeprefix(inner)
    return found


_COPIED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")
"""What peft puts into the name of a layer that it wraps, or of which it trains a copy."""
