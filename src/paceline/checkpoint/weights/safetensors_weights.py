"""Safetensors files as Hugging Face lays them out, read piece by piece: one file, or many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.weights.export_files import INDEX, SAFETENSORS_TYPES
from paceline.checkpoint.weights.weight_files import check_regular, shard_places
from paceline.errors import CheckpointError

_ONE_FILE = "model.safetensors"
_DTYPES = {word: dtype for dtype, word in SAFETENSORS_TYPES.items()}


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in one of the files."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def holds_safetensors(where: str | os.PathLike[str]) -> bool:
    """Whether ``where`` is a safetensors file on this machine, or a folder of them."""
    if "://" in os.fspath(where):
        return False
    path = Path(where)
    if path.is_dir():
        return any((path / name).is_file() for name in (_ONE_FILE, INDEX))
    return path.suffix == ".safetensors" and path.exists()


class SafetensorsWeights:
    """The tensors in a ``.safetensors`` file, or in a folder with one or with an index of many.

    Opening it reads what the files say of themselves, and no values.
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = os.fspath(where)
        self.weights: dict[str, StoredWeight] = {}
        self._open: dict[Path, Any] = {}
        for file, expected in _files(Path(where)).items():
            self._read_header(file, expected)
        if not self.weights:
            raise CheckpointError(f"{self.where} holds no tensors: there is nothing to load.")

    def _read_header(self, path: Path, expected: set[str] | None) -> None:
        with _opened(path) as file:
            names = set(file.keys())
            if expected is not None and (different := sorted(expected ^ names)):
                verb = "lacks" if different[0] in expected else "holds, against its index,"
                raise CheckpointError(f"{path} {verb} {different[0]!r}.")
            for name in sorted(names):
                part = file.get_slice(name)
                if (kind := part.get_dtype()) not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: {name!r} is of dtype {kind}, which cannot be loaded. Convert the "
                        "weights to bfloat16 or float32 first."
                    )
                shape = tuple(part.get_shape())
                self.weights[name] = StoredWeight(path, shape, _DTYPES[kind])

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Read many pieces without opening files anew for each."""
        with ExitStack() as stack:
            for path in {weight.file for weight in self.weights.values()}:
                self._open[path] = stack.enter_context(_opened(path))
            try:
                yield
            finally:
                self._open.clear()

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of the tensor ``name`` that lie in ``box``, and no others; see kept_open."""
        file = self._open[self.weights[name].file]
        return _read(file, name, box)


def _read(file: Any, name: str, box: Box) -> Tensor:
    if not box.shape:
        scalar: Tensor = file.get_tensor(name)
        return scalar
    found: Tensor = file.get_slice(name)[box.slices()]
    return found


def _files(path: Path) -> dict[Path, set[str] | None]:
    """The files, and of each the tensors that an index says are in it."""
    if not path.is_dir():
        return {path: None}
    names = sorted(os.listdir(path))
    if _ONE_FILE in names and INDEX in names:
        raise CheckpointError(
            f"{path} holds {_ONE_FILE} and {INDEX}: which of them counts? Move the other away."
        )
    if _ONE_FILE in names:
        return {path / _ONE_FILE: None}
    files: dict[Path, set[str] | None] = {}
    for tensor, file in shard_places(path / INDEX, names).items():
        known = files.setdefault(path / file, set())
        assert known is not None
        known.add(tensor)
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    check_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error
