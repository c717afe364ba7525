"""``save_checkpoint`` and ``load_checkpoint``: Paceline's checkpoints under DeepSpeed's tags."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import Part, RankState, empty_for, held_part
from paceline.checkpoint.sharded.save_load import load, save
from paceline.checkpoint.weights.weight_files import read_source
from paceline.engine.optimizer_groups import install
from paceline.engine.rank_state import MODEL, OBJECT, OPTIMIZER
from paceline.engine.whole_model import WholeModel
from paceline.errors import CheckpointError
from paceline.untrusted import read_text
from paceline.world import World

OWN = "deepspeed"
"""The object that holds what an engine like DeepSpeed's knows beside model and optimizer."""
_LATEST = "latest"
_LONGEST_TAG = 4096


class TaggedFolder:
    """Checkpoints of Paceline's in folders named by tags, and a file that names the latest."""

    def __init__(self) -> None:
        self._world = World.current()
        self._group: dist.ProcessGroup | None = None

    def save(
        self,
        where: str | os.PathLike[str],
        tag: str | int | None,
        step: int,
        state: RankState,
        own: dict[str, Any],
        *,
        latest: bool,
    ) -> None:
        """Save as ``where/tag``, in place of what had that tag; every rank calls it."""
        name = f"global_step{step}" if tag is None else str(tag)
        check_tag(name)
        path = Path(where) / name
        if self._world.rank == 0:
            state.objects[OWN] = own
        folder = Folder(path)
        save(folder, step, state, info={"tag": name}, group=self.meeting())
        if self._world.rank == 0:
            for other in folder.checkpoints():
                if other.step != step:
                    folder.remove(other)
            if latest:
                (Path(where) / _LATEST).write_text(name, encoding="utf-8")
        if self._world.size > 1:
            dist.barrier(self.meeting())  # a load may follow at once

    def find(
        self, where: str | os.PathLike[str], tag: str | int | None
    ) -> tuple[Path, Checkpoint | None] | None:
        """The folder of ``tag``, or of the latest save, and the checkpoint of ours in it."""
        if tag is None:
            latest = Path(where) / _LATEST
            if not latest.is_file():
                return None
            tag = read_text(latest, _LONGEST_TAG).strip()
        check_tag(str(tag))
        path = Path(where) / str(tag)
        if not path.is_dir():
            there = sorted(p.name for p in Path(where).glob("*") if p.is_dir())[:8]
            raise CheckpointError(
                f"{path}: there is no such folder. Name a tag that was saved: "
                f"{', '.join(there) or 'there is none'}."
            )
        found = Folder(path).checkpoints()
        return path, found[-1] if found else None

    def meeting(self) -> dist.ProcessGroup | None:
        """A group that nothing else uses, for CPU tensors."""
        if self._world.size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group


def check_tag(tag: str) -> None:
    """Refuse a tag that leads out of its folder: it may come from a file of somebody else's."""
    parts = Path(tag).parts
    if not parts or ".." in parts or Path(tag).is_absolute():
        raise CheckpointError(
            f"the tag {tag!r} must be a name below the folder of checkpoints, such as "
            "'global_step100'."
        )


class EngineFiles(TaggedFolder):
    """Writes and reads the state of one engine, at any number of ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        whole: WholeModel,
        names: list[list[str]],
    ) -> None:
        super().__init__()
        self._model, self._optimizer, self._whole = model, optimizer, whole
        self._group_names = names

    def load(self, checkpoint: Checkpoint, *, optimizer: bool, strict: bool) -> dict[str, Any]:
        """Take over a checkpoint; what the engine knows beside tensors is returned."""
        manifest = checkpoint.manifest
        parts: dict[str, Part] = {}
        missing = []
        for name, tensor in self._tensors().items():
            if MODEL + name in manifest.tensors:
                parts[MODEL + name] = held_part(tensor)
            else:
                missing.append(name)
        if missing and strict:
            raise CheckpointError(
                f"{checkpoint.path} does not fit this model: it lacks {', '.join(missing[:5])}. "
                "With load_module_strict=False such weights are left as they are."
            )
        found = checkpoint.read_object(OBJECT)
        state = self._optimizer_parts(parts, checkpoint) if optimizer else {}
        load(checkpoint, parts, self.meeting())
        if optimizer and self._optimizer is not None:
            install(self._optimizer, found["groups"], state)
        own: dict[str, Any] = checkpoint.read_object(OWN) if OWN in manifest.objects else {}
        return own

    def load_foreign(self, path: Path, *, strict: bool) -> None:
        """Take over the weights of a checkpoint that DeepSpeed itself wrote."""
        self.fill_module(read_source(path).tensors, strict=strict, source=str(path))
        if self._world.rank == 0:
            warnings.warn(
                f"{path} was written by DeepSpeed itself: its weights are loaded; optimizer, "
                "schedule and step begin anew.",
                stacklevel=4,
            )

    def fill_module(
        self, weights: Mapping[str, Tensor], *, strict: bool, source: str = "the state dict"
    ) -> None:
        """Give the model the values of a whole state dict."""
        own = self._tensors()
        missing = [name for name in own if name not in weights]
        unknown = [name for name in weights if name not in own and name not in self._whole.aliases]
        if strict and (missing or unknown):
            told = [f"it lacks {', '.join(missing[:5])}"] if missing else []
            told += [f"this model has no {', '.join(unknown[:5])}"] if unknown else []
            raise CheckpointError(f"{source} does not fit this model: {'; '.join(told)}.")
        with torch.no_grad():
            for name, tensor in own.items():
                if name in weights:
                    _fill(name, tensor, weights[name])

    # ------------------------------------------------------------------ inside

    def collect(self, step: int) -> RankState:
        """What this rank has to save."""
        state = RankState()
        for name, tensor in self._tensors().items():
            if name in self._whole.parameters or self._world.rank == 0:
                state.tensors[MODEL + name] = held_part(tensor)
        groups: list[dict[str, Any]] = []
        if self._optimizer is not None:
            self._collect_optimizer(state)
            groups = [
                {**{k: v for k, v in group.items() if k != "params"}, "params": names}
                for group, names in zip(
                    self._optimizer.param_groups, self._group_names, strict=True
                )
            ]
        if self._world.rank == 0:
            state.objects[OBJECT] = {
                "step": step,
                "aliases": self._whole.aliases,
                "groups": groups,
                "scaler": None,
                "schedule": None,
                "extra": {},
            }
        return state

    def _collect_optimizer(self, state: RankState) -> None:
        assert self._optimizer is not None
        for name, parameter in self._model.named_parameters():
            plain: dict[str, Any] = {}
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state.tensors[f"{OPTIMIZER}{name}/{key}"] = held_part(value)
                else:
                    plain[key] = value
            if plain and self._world.rank == 0:
                state.objects[OPTIMIZER + name] = plain

    def _optimizer_parts(
        self, parts: dict[str, Part], checkpoint: Checkpoint
    ) -> dict[nn.Parameter, dict[str, Any]]:
        manifest = checkpoint.manifest
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for name, parameter in self._model.named_parameters():
            prefix = f"{OPTIMIZER}{name}/"
            own: dict[str, Any] = {}
            for stored, entry in manifest.tensors.items():
                if stored.startswith(prefix) and "/" not in stored.removeprefix(prefix):
                    key = stored.removeprefix(prefix)
                    own[key] = empty_for(entry, like=parameter)
                    parts[stored] = held_part(own[key])
            if OPTIMIZER + name in manifest.objects:
                own |= checkpoint.read_object(OPTIMIZER + name)
            if own:
                state[parameter] = own
        return state

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters and saved buffers of the model, as this rank holds them."""
        found: dict[str, Tensor] = dict(self._model.named_parameters())
        buffers = self._model.named_buffers(remove_duplicate=False)
        return found | {name: value for name, value in buffers if name in self._whole.buffers}


def whole_tensors(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The model's state dict, whole, on the CPU. A collective."""
    found = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            full = getattr(value, "full_tensor", lambda value=value: value)()
            cast = dtype if dtype is not None and full.is_floating_point() else full.dtype
            found[name] = full.detach().to("cpu", cast, copy=True)
    return found


def _fill(name: str, tensor: Tensor, value: Tensor) -> None:
    if tuple(value.shape) != tuple(tensor.shape):
        raise CheckpointError(
            f"{name} has shape {list(value.shape)} there and {list(tensor.shape)} here."
        )
    for piece in held_part(tensor).pieces:
        piece.tensor.copy_(value[piece.box.slices()] if value.ndim else value)
