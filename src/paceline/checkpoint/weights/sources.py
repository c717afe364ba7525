"""Weights in files of other programs, read without executing anything in them.

Files are mapped, not read: the bytes come into memory when they are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickletools
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.manifest import NAME
from paceline.errors import CheckpointError

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict", "module")
_OLD = re.compile(r"step-\d+\.pt")
_HARMLESS = re.compile(r"collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.\w*Storage")
_KINDS = "a .safetensors file, a Hugging Face folder, or a state dict saved by torch (.pt)"


@dataclass(frozen=True)
class Source:
    """Tensors by name, what ``kind`` of source they are from, and its Hugging Face config."""

    kind: str
    tensors: dict[str, Tensor]
    hf_config: dict[str, Any] = field(default_factory=dict)


def read_source(path: str | os.PathLike[str]) -> Source:
    """The weights in a safetensors file, a Hugging Face folder or a torch file."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name {_KINDS}.")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".safetensors":
        return Source("safetensors", _read_safetensors(path))
    if path.suffix in _TORCH_ENDINGS or zipfile.is_zipfile(path):
        return _read_torch(path)
    raise CheckpointError(f"{path} is neither of what can be imported: {_KINDS}.")


def _read_folder(folder: Path) -> Source:
    names = sorted(os.listdir(folder))
    for index, read in (
        ("model.safetensors.index.json", _read_safetensors),
        ("pytorch_model.bin.index.json", _read_state_dict),
    ):
        if index in names:
            return Source("hf", _read_shards(folder / index, read), _config(folder))
    for file, read in (
        ("model.safetensors", _read_safetensors),
        ("pytorch_model.bin", _read_state_dict),
    ):
        if file in names:
            return Source("hf", read(folder / file), _config(folder))
    raise CheckpointError(f"{folder} holds no model.safetensors{_hint(folder, names)}")


def _hint(folder: Path, names: Sequence[str]) -> str:
    if old := [name for name in names if _OLD.fullmatch(name)]:
        return f"; import one of Paceline 0.1's checkpoints by its name: {folder / old[-1]}"
    if NAME in names or any(name.startswith("step-") for name in names):
        return ": it is a checkpoint of Paceline's already, which needs no import."
    return f" and no pytorch_model.bin: it is no Hugging Face folder. Name {_KINDS}."


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return _json(file) if file.is_file() else {}


def _read_shards(index: Path, read: Any) -> dict[str, Tensor]:
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{index} is no index of files: it has no 'weight_map'.")
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is outside of its folder.")
        shard = read(index.parent / name)
        expected = {tensor for tensor, place in places.items() if place == name}
        if different := sorted(expected ^ shard.keys()):
            verb = "lacks" if different[0] in expected else "holds, against its index,"
            raise CheckpointError(f"{index.parent / name} {verb} {different[0]!r}.")
        found.update(shard)
    return {name: found[name] for name in places}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _read_torch(path: Path) -> Source:
    """A state dict, alone or beside other things; or a checkpoint of Paceline 0.1."""
    content = _load(path)
    if isinstance(content, dict) and content.get("format") == 1 and "engine" in content:
        return Source("paceline-0.1", _checked(content["engine"]["model"], path))
    return Source("torch", _checked(content, path))


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    return _checked(_load(path), path)


def _load(path: Path) -> Any:
    try:
        # Only torch's newer files can be mapped.
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except Exception as error:  # torch.load raises whatever the damage makes it trip over
        if needed := _code_needed(path):
            raise CheckpointError(
                f"{path} needs {', '.join(needed)}, and loading those would execute code from the "
                "file. Where you trust it, save a plain state dict with the program that made it: "
                "torch.save(model.state_dict(), …)."
            ) from None
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read by torch.load without executing "
            f"code from it: {type(error).__name__}."
        ) from error


def _code_needed(path: Path) -> list[str]:
    """The names that a file wants called and torch does not allow."""
    try:
        if zipfile.is_zipfile(path):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        return sorted(name for name in _globals_in(path) if not _HARMLESS.fullmatch(name))
    except Exception:  # a damaged file: nobody can tell
        return []


def _globals_in(path: Path) -> set[str]:
    """What the pickles at the beginning of a file name, found without loading any of them."""
    found: set[str] = set()
    texts: list[str] = []
    with open(path, "rb") as file, contextlib.suppress(ValueError):  # where the pickles end
        while True:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    found.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    found.add(".".join(texts[-2:]))
                elif isinstance(argument, str):
                    texts.append(argument)
    return found


def _checked(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what a file holds; every value of it must be a tensor."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict.")
    if not any(isinstance(value, Tensor) for value in content.values()):
        nested = [key for key in _NESTED if isinstance(content.get(key), Mapping)]
        if len(nested) != 1:
            raise CheckpointError(
                f"{path} holds no state dict: tensors by name, or those in one of "
                f"{', '.join(_NESTED)}. It has the keys {', '.join(map(str, [*content][:8]))}."
            )
        content = content[nested[0]]
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__}, and weights are tensors. Save the "
                "state dict without it."
            )
    return {str(name): value for name, value in content.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return found
