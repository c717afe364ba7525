"""Model weights out of a checkpoint, for other programs: safetensors, Hugging Face, torch.

Everything is written under a temporary name and renamed when complete: a failed export leaves
nothing behind.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.tensor_bytes import dtype_of
from paceline.checkpoint.weights.export_config import hf_config
from paceline.checkpoint.weights.export_files import (
    INDEX,
    Weight,
    check_file,
    check_hf_folder,
    fresh,
    sync,
    word,
    write_json,
    write_safetensors,
)
from paceline.checkpoint.weights.saved_weights import SavedWeights
from paceline.errors import CheckpointError
from paceline.formatting import one_of
from paceline.options.ema import Weights

FORMATS = ("safetensors", "hf", "torch")
_BY_ENDING = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
MAX_SHARD = 5_000_000_000

Progress = Callable[[int], None]


def weights_of(
    checkpoint: Checkpoint,
    *,
    part: str = "",
    dtype: torch.dtype | str | None = None,
    weights: Weights = "model",
    engine: str | None = None,
) -> list[Weight]:
    """The model's tensors, a tied one under each of its names.

    ``part`` picks the submodule of this name, whose tensors then go without it in their names.
    ``dtype`` is what floating-point ones shall become. ``weights="ema"`` takes the averaged ones,
    and ``engine`` is the name of one that was saved with others.
    """
    wanted = _dtype(dtype)
    tensors = checkpoint.manifest.tensors
    saved = SavedWeights(checkpoint, weights, engine)
    keys = dict(saved.keys)
    for alias, first in saved.aliases().items():
        keys.setdefault(alias, saved.keys[first])
    prefix = f"{part}." if part else ""
    found = []
    for name, key in keys.items():
        if name.startswith(prefix):
            own = dtype_of(tensors[key])
            kind = wanted if wanted is not None and own.is_floating_point else own
            found.append(Weight(name.removeprefix(prefix), key, tensors[key].shape, kind))
    if not found:
        raise CheckpointError(
            f"{checkpoint.path} holds no tensors of a model{f' below {part!r}' if part else ''}; "
            f"it has {_some([*keys] or [*tensors])}."
        )
    return found


def format_for(target: str | os.PathLike[str], format: str | None = None) -> str:
    """The format that ``target`` is to be written in: the one given, else by how its name ends.

    A name without an ending gets safetensors. One that says another format than the one given is
    refused: other programs go by it.
    """
    ending = Path(target).suffix
    meant = _BY_ENDING.get(ending.lower())
    if format is not None and format not in FORMATS:
        raise CheckpointError(f"format {format!r} must be {one_of(FORMATS)}.")
    if format is None and not ending:
        return "safetensors"
    if format is None and meant is None:
        raise CheckpointError(
            f"{os.fspath(target)}: in which format? Let the name end in .safetensors or .pt, or "
            f"give the format (--format), {one_of(FORMATS)}."
        )
    if format is not None and meant not in (None, format):
        raise CheckpointError(
            f"{os.fspath(target)} ends in {ending}, which is for the format {meant}, and "
            f"the format {format} was asked for. Choose another name, or leave the format out."
        )
    return format or meant or ""


def export_weights(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    format: str | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    max_shard: int = MAX_SHARD,
    part: str = "",
    dtype: torch.dtype | str | None = None,
    weights: Weights = "model",
    engine: str | None = None,
    force: bool = False,
    follow: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the weights in one of ``FORMATS``; see the functions for each.

    Without a ``format`` the end of ``target``'s name decides.
    """
    common: dict[str, Any] = dict(part=part, dtype=dtype, weights=weights, engine=engine)
    common |= dict(force=force, progress=progress)
    format = format_for(target, format)
    if format == "hf":
        return export_hf(
            checkpoint, target, config=config, max_shard=max_shard, follow=follow, **common
        )
    if config is not None:
        raise CheckpointError(
            f"a Hugging Face config ({os.fspath(config)}) is for the format hf, not {format}."
        )
    if format == "torch":
        return export_torch(checkpoint, target, **common)
    return export_safetensors(checkpoint, target, **common)


def export_safetensors(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    *,
    part: str = "",
    dtype: torch.dtype | str | None = None,
    weights: Weights = "model",
    engine: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the weights to one ``.safetensors`` file, one tensor in memory at a time.

    Tied weights are written under each of their names, so that a plain ``load_state_dict`` of what
    ``safetensors.torch.load_file`` gives finds all of them.
    """
    format_for(target, "safetensors")
    found = weights_of(checkpoint, part=part, dtype=dtype, weights=weights, engine=engine)
    with (
        checkpoint.kept_open(),
        fresh(target, force, check_file) as temporary,
        open(temporary, "xb") as file,
    ):
        write_safetensors(file, found, _reading(checkpoint, progress))
    _warn_of_extra(checkpoint, part, engine)
    return Path(target)


def export_torch(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    *,
    part: str = "",
    dtype: torch.dtype | str | None = None,
    weights: Weights = "model",
    engine: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the weights as a ``.pt`` state dict that ``torch.load(weights_only=True)`` reads.

    Names of tied weights share their memory there too. Takes the memory of the whole model.
    """
    format_for(target, "torch")
    found = weights_of(checkpoint, part=part, dtype=dtype, weights=weights, engine=engine)
    with checkpoint.kept_open(), fresh(target, force, check_file) as temporary:
        read = _reading(checkpoint, progress)
        once = {weight.key: weight for weight in found}
        tensors = {key: read(weight) for key, weight in once.items()}
        with open(temporary, "xb") as file:
            state = {weight.name: tensors[weight.key] for weight in found}
            extra = SavedWeights(checkpoint, engine=engine).extra(part)
            torch.save({**state, **extra}, file)
            sync(file)
    return Path(target)


def export_hf(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    max_shard: int = MAX_SHARD,
    part: str = "",
    dtype: torch.dtype | str | None = None,
    weights: Weights = "model",
    engine: str | None = None,
    force: bool = False,
    follow: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a folder that ``AutoModel.from_pretrained`` and its like load.

    ``config``: a ``config.json`` or a folder that holds one; by default what the checkpoint was
    imported with, or that of the pretrained model which the run's config names, which is fetched
    from elsewhere only where ``follow`` is set. Weights of more than ``max_shard`` bytes are spread
    over several files with an index.
    """
    format_for(target, "hf")
    if max_shard < 1:
        raise CheckpointError(f"files of at most {max_shard} bytes: it takes at least 1.")
    found = weights_of(checkpoint, part=part, dtype=dtype, weights=weights, engine=engine)
    settings = hf_config(checkpoint, config, _main_dtype(found), follow=follow)
    with checkpoint.kept_open(), fresh(target, force, check_hf_folder) as folder:
        folder.mkdir()
        shards = _shards(found, max_shard)
        names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            with open(folder / name, "xb") as file:
                write_safetensors(file, shard, _reading(checkpoint, progress))
        if len(shards) > 1:
            write_json(folder / INDEX, _index(names, shards))
        write_json(folder / "config.json", settings)
    _warn_of_extra(checkpoint, part, engine)
    return Path(target)


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shards(weights: Sequence[Weight], limit: int) -> list[list[Weight]]:
    """Cut into runs of at most ``limit`` bytes; a larger tensor has one to itself."""
    shards: list[list[Weight]] = [[]]
    used = 0
    for weight in weights:
        if shards[-1] and used + weight.bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += weight.bytes
    return shards


def _index(names: Sequence[str], shards: Sequence[Sequence[Weight]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(weight.bytes for shard in shards for weight in shard)},
        "weight_map": {
            weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard
        },
    }


def _reading(checkpoint: Checkpoint, progress: Progress | None) -> Callable[[Weight], Tensor]:
    def read(weight: Weight) -> Tensor:
        tensor = checkpoint.read_tensor(weight.key).to(weight.dtype)
        if progress is not None:
            progress(weight.bytes)
        return tensor

    return read


def _warn_of_extra(checkpoint: Checkpoint, part: str, engine: str | None) -> None:
    if extra := SavedWeights(checkpoint, engine=engine).extra(part):
        warnings.warn(
            f"left out, since safetensors files hold nothing but tensors: {_some([*extra])}. The "
            "format torch keeps them.",
            stacklevel=3,
        )


def _dtype(wanted: torch.dtype | str | None) -> torch.dtype | None:
    if wanted is None:
        return None
    found = wanted if isinstance(wanted, torch.dtype) else getattr(torch, wanted, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(
            f"dtype {wanted}: give a floating-point one, such as float32, bfloat16 or float16."
        )
    return found


def _main_dtype(weights: Sequence[Weight]) -> str:
    """The floating-point dtype that most of the model is in."""
    sizes: dict[torch.dtype, int] = {}
    for weight in weights:
        if weight.dtype.is_floating_point:
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.bytes
    return word(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else "float32"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
