"""The same state saved by Paceline, by torch.distributed.checkpoint and by torch.save."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpointing.damages import Site
from checkpointing.forks import Here
from checkpointing.states import Shapes, rows_in, state_of, whole_parts
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import MANIFEST, name_of
from paceline.checkpoint.sharded.save_load import load, save

Tensors = dict[str, Tensor]


class Saves(ABC):
    """One way to save. ``name`` is for people; ``manifest`` the file that describes the others."""

    name: str
    manifest: str | None = None

    @abstractmethod
    def save(self, here: Here, root: Path, step: int, tensors: Tensors) -> None:
        """Save the part of this rank; called by all ranks."""

    @abstractmethod
    def load(self, root: Path, step: int, into: Tensors) -> Tensors:
        """The whole state, in one process; ``into`` may be written over."""

    def folder(self, root: Path, step: int) -> Path:
        """Where it is."""
        return root / name_of(step)

    def site(self, root: Path, step: int, stale: tuple[Path, ...]) -> Site:
        """Where it can be damaged."""
        return Site(self.folder(root, step), self.folder(root, step - 1), self.manifest, stale)


class Paceline(Saves):
    """Paceline's."""

    name = "Paceline"
    manifest = MANIFEST

    def save(self, here: Here, root: Path, step: int, tensors: Tensors) -> None:
        """See ``Saves.save``."""
        objects = {f"random/{here.rank}": {"step": step, "numbers": list(range(1000))}}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        rows = rows_in(tensors, here.rank, here.world)
        state = state_of(rows, shapes, here.rank, here.world, objects)
        save(Folder(root), step, state, info={"world_size": here.world}, group=here.group())

    def load(self, root: Path, step: int, into: Tensors) -> Tensors:
        """See ``Saves.load``."""
        checkpoint = Folder(root).get(step)
        for name in checkpoint.manifest.objects:
            if checkpoint.read_object(name)["step"] != step:
                raise AssertionError(f"{name} is that of another step")
        load(checkpoint, whole_parts(into), None)
        return into


class Distributed(Saves):
    """torch.distributed.checkpoint with its own file format."""

    name = "torch.distributed.checkpoint"
    manifest = ".metadata"

    def save(self, here: Here, root: Path, step: int, tensors: Tensors) -> None:
        """See ``Saves.save``."""
        folder = self.folder(root, step)
        if here.group() is None:
            with quiet():
                dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        else:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            sharded = shards_of(rows_in(tensors, here.rank, here.world), shapes, here)
            with quiet():
                dcp.save(sharded, storage_writer=dcp.FileSystemWriter(folder))

    def load(self, root: Path, step: int, into: Tensors) -> Tensors:
        """See ``Saves.load``."""
        with quiet():
            reader = dcp.FileSystemReader(self.folder(root, step))
            dcp.load(into, storage_reader=reader, no_dist=True)
        return into


class TorchSave(Saves):
    """One file by torch.save on one rank."""

    name = "torch.save"

    def save(self, here: Here, root: Path, step: int, tensors: Tensors) -> None:
        """See ``Saves.save``."""
        if here.rank == 0:
            self.folder(root, step).mkdir(parents=True, exist_ok=True)
            torch.save(tensors, self.folder(root, step) / "state.pt")

    def load(self, root: Path, step: int, into: Tensors) -> Tensors:
        """See ``Saves.load``."""
        return torch.load(self.folder(root, step) / "state.pt", weights_only=True)


def shards_of(rows: Tensors, shapes: Shapes, here: Here) -> dict[str, DTensor | Tensor]:
    """The rows that this rank has, as DTensors; what has no rows, whole."""
    mesh = init_device_mesh("cpu", (here.world,))
    sharded: dict[str, DTensor | Tensor] = {}
    for name, tensor in rows.items():
        sharded[name] = tensor
        if tensor.ndim:
            whole = torch.empty(shapes[name], device="meta")
            sharded[name] = DTensor.from_local(
                tensor,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
    return sharded


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says about running alone, and the tracebacks it logs on its own."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
