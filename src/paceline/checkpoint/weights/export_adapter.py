"""Adapters out of a checkpoint, or out of an engine, in the folder that peft loads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.weights.export_files import (
    Weight,
    fresh,
    write_json,
    write_safetensors,
)
from paceline.errors import CheckpointError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"\w[\w.-]*")
_NO_ADAPTER = (
    "Only adapters of peft are written so, whose tensors are in the model; others are saved by "
    "peft's own model.save_pretrained."
)


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter of the submodule ``part``; ``tensors`` by name in its file, as in the model."""

    part: str
    name: str
    config: dict[str, Any]
    tensors: dict[str, str]


def read_adapters(described: Any, part: str, source: str) -> list[SavedAdapter]:
    """The adapters of one model among ``described``; ``part`` says which, where there are more.

    ``source`` is where they were found. What is there may have been written by anyone.
    """
    found = [_adapter(one, source) for one in (described if isinstance(described, list) else [])]
    parts = list(dict.fromkeys(adapter.part for adapter in found))
    if not parts:
        raise CheckpointError(f"{source} holds no adapter. {_NO_ADAPTER}")
    if not part and len(parts) > 1:
        raise CheckpointError(
            f"{source} holds adapters of {len(parts)} models: {', '.join(parts)}. Name one (part=, "
            "--part)."
        )
    chosen = part or parts[0]
    if chosen not in parts:
        there = ", ".join(repr(one) for one in parts)
        raise CheckpointError(f"{source} holds no adapter below {part!r}; there are: {there}.")
    return [adapter for adapter in found if adapter.part == chosen]


def _adapter(told: Any, source: str) -> SavedAdapter:
    try:
        adapter = SavedAdapter(told["part"], told["name"], told["config"], told["tensors"])
    except (TypeError, KeyError):
        adapter = SavedAdapter("", "", {}, {})
    names = (*adapter.tensors, *adapter.tensors.values()) if adapter.tensors else ()
    sound = (
        isinstance(adapter.name, str)
        and _NAME.fullmatch(adapter.name) is not None
        and isinstance(adapter.part, str)
        and isinstance(adapter.config, dict)
        and isinstance(adapter.tensors, dict)
        and all(isinstance(name, str) for name in names)
    )
    if not sound:
        raise CheckpointError(f"{source} describes an adapter that is none: it was changed.")
    return adapter


def write_adapters(
    target: str | os.PathLike[str],
    adapters: Sequence[tuple[SavedAdapter, Sequence[Weight]]],
    read: Callable[[Weight], Tensor],
    *,
    force: bool,
) -> Path:
    """Write a folder for ``PeftModel.from_pretrained``: the config and the weights, nothing else.

    As with peft, the adapter ``default`` goes into the folder itself, others into one below it.
    """
    with fresh(target, force, _check_replaced) as folder:
        folder.mkdir()
        for adapter, weights in adapters:
            own = folder if adapter.name == "default" else folder / adapter.name
            own.mkdir(exist_ok=True)
            with open(own / _WEIGHTS, "xb") as file:
                write_safetensors(file, weights, read)
            write_json(own / _CONFIG, adapter.config)
    return Path(target)


def _check_replaced(path: Path) -> None:
    """Only what an export wrote is replaced."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; only a folder can be replaced by this export.")
    for file in sorted(path.rglob("*")):
        if not file.is_dir() and file.name not in (_CONFIG, _WEIGHTS):
            raise CheckpointError(
                f"{path} holds {file.name}, which no export wrote and would be lost. Choose "
                "another folder, or move that file away."
            )
