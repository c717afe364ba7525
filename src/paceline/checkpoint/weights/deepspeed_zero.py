"""Weights in checkpoints that DeepSpeed's ZeRO wrote, put together from the files of its ranks.

What DeepSpeed pickles beside tensors (its scaler, its enumerations) is read as a value that does
nothing, so no code of the files is executed and DeepSpeed need not be installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.weights.torch_files import load_torch_file
from paceline.errors import CheckpointError
from paceline.untrusted import NotReadable, read_text

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LATEST = "latest"
_LONGEST_TAG = 4096
_PICKLED = ("deepspeed.",)
_FLAT = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups"}
_FLAT |= {3: "fp32_flat_groups"}


def zero_folder(where: str | os.PathLike[str], tag: str | None = None) -> Path | None:
    """The folder of a ZeRO checkpoint: ``where`` itself, or the one of ``tag`` or latest in it."""
    if "://" in os.fspath(where):
        return None
    path = Path(where)
    if tag is None and _is_zero(path):
        return path
    if tag is None:
        try:
            tag = read_text(path / _LATEST, _LONGEST_TAG).strip()
        except (NotReadable, OSError, ValueError):
            return None
    if not tag or ".." in Path(tag).parts or Path(tag).is_absolute():
        raise CheckpointError(f"{path}: the tag {tag!r} is no name of a folder in it.")
    return path / tag if _is_zero(path / tag) else None


def _is_zero(path: Path) -> bool:
    return path.is_dir() and any(_OPTIMIZER.fullmatch(name) for name in os.listdir(path))


def read_zero_checkpoint(
    where: str | os.PathLike[str], tag: str | None = None
) -> dict[str, Tensor]:
    """The weights of a checkpoint that DeepSpeed wrote with ZeRO 1, 2 or 3, in float32.

    ``where`` is what was given to ``save_checkpoint``, of which the latest or ``tag`` is read, or
    the folder of one tag. Executes no code from the files.
    """
    folder = zero_folder(where, tag)
    if folder is None:
        raise CheckpointError(
            f"{os.fspath(where)} holds no checkpoint of DeepSpeed's ZeRO"
            + (f" with the tag {tag!r}" if tag else "")
            + ": files like zero_pp_rank_0_mp_rank_00_optim_states.pt. Name the folder that "
            "save_checkpoint was given, or the one of a tag."
        )
    try:
        return _Parts(folder).weights()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is not as DeepSpeed writes it ({type(error).__name__}: {error}). Convert it "
            "with the zero_to_fp32.py that lies beside it."
        ) from error


class _Parts:
    """The files of one tag: of each rank its part of the flat parameters, and what is in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        optimizers = self._files(_OPTIMIZER)
        first = _load(optimizers[0])["optimizer_state_dict"]
        self.stage = _whole_number(first["zero_stage"])
        count = first["partition_count"]
        count = max(count) if isinstance(count, Sequence) else count
        if self.stage not in _FLAT:
            raise CheckpointError(
                f"{folder}: it is of ZeRO stage {self.stage}; stages 1, 2 and 3 are read."
            )
        if count != len(optimizers):
            raise CheckpointError(
                f"{folder} lacks files: {count} ranks wrote it, and those of {len(optimizers)} are "
                "there."
            )
        states = [first, *(_load(path)["optimizer_state_dict"] for path in optimizers[1:])]
        self.flat: list[list[Tensor]] = [list(state[_FLAT[self.stage]]) for state in states]
        self.models = [_load(path) for path in self._files(_MODEL)]
        if self.stage == 3 and len(self.models) != count:
            raise CheckpointError(
                f"{folder} lacks files: {count} ranks wrote it, and the model states of "
                f"{len(self.models)} are there."
            )

    def _files(self, pattern: re.Pattern[str]) -> list[Path]:
        """By rank. Other models' parts, of tensor parallelism, are not put together."""
        found: dict[int, Path] = {}
        for name in sorted(os.listdir(self._folder)):
            if match := pattern.fullmatch(name):
                if int(match[2]):
                    raise CheckpointError(
                        f"{self._folder}: {name} is of tensor parallelism, whose parts cannot be "
                        "put together without the model. Convert it with DeepSpeed itself."
                    )
                found[int(match[1] or 0)] = self._folder / name
        if sorted(found) != list(range(len(found))) or not found:
            raise CheckpointError(f"{self._folder} lacks files of a rank: it has {sorted(found)}.")
        return [found[rank] for rank in sorted(found)]

    def weights(self) -> dict[str, Tensor]:
        model = self.models[0]
        # Below stage 3 the model is there whole, frozen parameters included, in its own precision.
        plain = model["buffer_names"] if self.stage == 3 else model["module"]
        held = {name: model["module"][name] for name in plain}
        found = {
            name: value.float() if value.is_floating_point() else value
            for name, value in held.items()
        }
        found |= dict(self._frozen())
        found |= dict(self._sharded() if self.stage == 3 else self._partitioned())
        for alias, name in dict(model.get("shared_params") or {}).items():
            if name in found:
                found[alias] = found[name]
        order = [*model["module"], *found]  # as in the model, where that is known
        return {name: found[name].contiguous() for name in dict.fromkeys(order) if name in found}

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        shapes = self.models[0].get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            parts = [model["frozen_param_fragments"][name] for model in self.models]
            own = parts if self.stage == 3 else parts[:1]
            yield name, _cut(torch.cat([part.flatten() for part in own]), shape).float()

    def _partitioned(self) -> Iterator[tuple[str, Tensor]]:
        """Stages 1 and 2: each group is one flat tensor, of which each rank has a stretch."""
        shapes = self.models[0]["param_shapes"]
        for index, group in enumerate(shapes):
            flat = torch.cat([own[index].flatten() for own in self.flat])
            at = 0
            for name, shape in group.items():
                yield name, _cut(flat[at:], shape)
                at += shape.numel()

    def _sharded(self) -> Iterator[tuple[str, Tensor]]:
        """Stage 3: of each parameter each rank has an equal stretch, the last one filled up."""
        flat = [torch.cat([part.flatten() for part in own]) for own in self.flat]
        at = 0
        for group in self.models[0]["param_shapes"]:
            for name, shape in group.items():
                size = -(-shape.numel() // len(flat))
                yield name, _cut(torch.cat([own[at : at + size] for own in flat]), shape)
                at += size


def _cut(flat: Tensor, shape: torch.Size) -> Tensor:
    """The first elements in that shape; fewer than needed are a damaged file."""
    if flat.numel() < shape.numel():
        raise ValueError(f"{flat.numel()} numbers are too few for the shape {list(shape)}")
    return flat[: shape.numel()].reshape(shape)


def _load(path: Path) -> Mapping[str, Any]:
    found = load_torch_file(path, without_effect=_PICKLED)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a mapping.")
    return found


def _whole_number(value: Any) -> int:
    """A number, or the enumeration of one."""
    arguments = getattr(value, "arguments", ())
    return int(arguments[0] if arguments else value)


class ZeroWeights:
    """A ZeRO checkpoint in the form of ``SafetensorsWeights``: whole, in memory."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = os.fspath(where)
        self.weights = read_zero_checkpoint(where)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Nothing is open."""
        yield

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of the tensor ``name`` that lie in ``box``."""
        found = self.weights[name]
        return found[box.slices()] if found.ndim else found
