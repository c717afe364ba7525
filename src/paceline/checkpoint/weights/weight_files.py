"""Weights in files of other programs, read without executing anything in them.

Files are mapped, not read: the bytes come into memory when they are used.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.weights.deepspeed_zero import read_zero_checkpoint, zero_folder
from paceline.checkpoint.weights.torch_files import is_zip, load_torch_file
from paceline.errors import CheckpointError

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict", "module")
_OLD = re.compile(r"step-\d+\.pt")
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_LARGEST_JSON = 256 * 1024 * 1024
_KINDS = "a .safetensors file, a Hugging Face folder, or a state dict saved by torch (.pt)"


Reader = Callable[[Path], dict[str, Tensor]]


@dataclass(frozen=True)
class LoadedWeights:
    """Tensors by name, what ``kind`` of source they are from, and its Hugging Face config."""

    kind: str
    tensors: dict[str, Tensor]
    hf_config: dict[str, Any] = field(default_factory=dict)


def read_source(path: str | os.PathLike[str]) -> LoadedWeights:
    """The weights in a safetensors file, a Hugging Face folder, a torch file or ZeRO's folder."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name {_KINDS}.")
    if path.is_dir():
        if (zero := zero_folder(path)) is not None:
            return LoadedWeights("deepspeed", read_zero_checkpoint(zero))
        return _read_folder(path)
    check_regular(path)
    if path.suffix == ".safetensors":
        return LoadedWeights("safetensors", _read_safetensors(path))
    if path.suffix in _TORCH_ENDINGS or is_zip(path):
        return _read_torch(path)
    raise CheckpointError(f"{path} is neither of what can be imported: {_KINDS}.")


def _read_folder(folder: Path) -> LoadedWeights:
    names = sorted(os.listdir(folder))
    for file, index, read in (
        ("model.safetensors", "model.safetensors.index.json", _read_safetensors),
        ("pytorch_model.bin", "pytorch_model.bin.index.json", _read_state_dict),
    ):
        if file in names and index in names:
            raise CheckpointError(
                f"{folder} holds {file} and {index}: which of them counts? Move the other away."
            )
        if index in names:
            return LoadedWeights("hf", _read_shards(folder / index, names, read), _config(folder))
        if file in names:
            return LoadedWeights("hf", read(folder / file), _config(folder))
    raise CheckpointError(f"{folder} holds no model.safetensors{_hint(folder, names)}")


def _hint(folder: Path, names: Sequence[str]) -> str:
    if old := [name for name in names if _OLD.fullmatch(name)]:
        return f"; import one of Paceline 0.1's checkpoints by its name: {folder / old[-1]}"
    if MANIFEST in names or any(name.startswith("step-") for name in names):
        return ": it is a checkpoint of Paceline's already, which needs no import."
    return f" and no pytorch_model.bin: it is no Hugging Face folder. Name {_KINDS}."


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return _json(file) if file.is_file() else {}


def shard_places(index: Path, names: Sequence[str]) -> dict[str, str]:
    """By tensor: the file that an index says it is in. ``names``: the files that are beside it."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{index} is no index of files: it has no 'weight_map'.")
    files = sorted(set(places.values()))
    for name in files:
        if not name or name in (".", "..") or {*name} & {*"/\\\0"}:
            raise CheckpointError(f"{index} names {name!r}, which is outside of its folder.")
    if left_out := [name for name in names if _SHARD.fullmatch(name) and name not in files]:
        raise CheckpointError(
            f"{index} does not name {left_out[0]}, which is beside it: is the index that of other "
            "weights? Move the files away that are not part of them."
        )
    return places


def _read_shards(index: Path, names: Sequence[str], read: Reader) -> dict[str, Tensor]:
    """The tensors of all files that an index names, each where it says and nowhere else."""
    places = shard_places(index, names)
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        shard = read(index.parent / name)
        expected = {tensor for tensor, place in places.items() if place == name}
        if different := sorted(expected ^ shard.keys()):
            verb = "lacks" if different[0] in expected else "holds, against its index,"
            raise CheckpointError(f"{index.parent / name} {verb} {different[0]!r}.")
        found.update(shard)
    return {name: found[name] for name in places}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _read_torch(path: Path) -> LoadedWeights:
    """A state dict, alone or beside other things; or a checkpoint of Paceline 0.1."""
    content = load_torch_file(path)
    if isinstance(content, dict) and content.get("format") == 1 and "engine" in content:
        return LoadedWeights("paceline-0.1", _checked(content["engine"]["model"], path))
    return LoadedWeights("torch", _checked(content, path))


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    return _checked(load_torch_file(path), path)


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
        if not isinstance(name, str):
            raise CheckpointError(
                f"{path}: the key {name!r} of a tensor is a {type(name).__name__}, and weights go "
                "by names, which are text. Save the state dict with names for keys."
            )
    return dict(content)


def check_regular(path: Path) -> None:
    """Refuse pipes and devices, which would be read for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} cannot be read: it is no regular file.")


def _json(path: Path) -> dict[str, Any]:
    check_regular(path)
    try:
        if (size := path.stat().st_size) > _LARGEST_JSON:
            raise CheckpointError(f"{path} has {size} bytes, of at most {_LARGEST_JSON}.")
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_twins)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twin!r} twice")
    return found
