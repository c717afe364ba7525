"""How an export becomes a file or a folder: whole, or not there at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from paceline.checkpoint.storage.os_errors import explained
from paceline.checkpoint.tensor_bytes import memory_of
from paceline.errors import CheckpointError

INDEX = "model.safetensors.index.json"

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class Weight:
    """A tensor of the model: the ``name`` it gets, the ``key`` it has in the checkpoint."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """How many bytes it takes in ``dtype``."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    file: BinaryIO, weights: Sequence[Weight], read: Callable[[Weight], Tensor]
) -> None:
    """Write a safetensors file, by hand: the library's writer wants all tensors in memory at once.

    The length of the header in 8 bytes, the header in JSON, then the bytes of one tensor after the
    other without gaps. Wide dtypes come first, so that each begins where its dtype is aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)
    end = 0
    for weight in ordered:
        start, end = end, end + weight.bytes
        header[weight.name] = {
            "dtype": _safetensors_type(weight),
            "shape": weight.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for weight in ordered:
        tensor = read(weight)
        if tensor.numel():
            file.write(memory_of(tensor))
    sync(file)


def _safetensors_type(weight: Weight) -> str:
    if weight.dtype not in SAFETENSORS_TYPES:
        raise CheckpointError(
            f"{weight.name!r} is of dtype {word(weight.dtype)}, which safetensors files do not "
            "know. Export to the format torch, or give a dtype to convert to."
        )
    return SAFETENSORS_TYPES[weight.dtype]


@contextmanager
def fresh(
    target: str | os.PathLike[str], force: bool, check_replaced: Callable[[Path], None]
) -> Iterator[Path]:
    """A name beside ``target`` that becomes ``target`` if the block succeeds."""
    if "://" in os.fspath(target):
        raise CheckpointError(
            f"cannot export to {os.fspath(target)}: give a local path, and copy the result there."
        )
    path = Path(target)
    _check_target(path, force, check_replaced)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with explained("write", str(path)):
            yield temporary
            _check_target(path, force, check_replaced)  # it may have come into being meanwhile
            if path.is_dir():
                _swap_folders(temporary, path)
            else:
                os.replace(temporary, path)
    except RuntimeError as error:  # torch.save reports a full disk as one
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot write {path}: {error}. Nothing was left there.") from error
    finally:
        _remove(temporary)


def _check_target(path: Path, force: bool, check_replaced: Callable[[Path], None]) -> None:
    if not path.absolute().parent.is_dir():
        raise CheckpointError(f"cannot write {path}: there is no folder {path.absolute().parent}.")
    if not os.path.lexists(path):
        return
    if not force:
        raise CheckpointError(
            f"{path} is there already. Choose another name, or force it to be replaced (--force)."
        )
    check_replaced(path)


def check_file(path: Path) -> None:
    """Refuse to replace anything but a file."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; only a file can be replaced by this export.")
    if not path.is_file() and not path.is_symlink():  # to put a file there would end it for all
        raise CheckpointError(f"{path} is a device or a pipe; only a file can be replaced.")


def check_hf_folder(path: Path) -> None:
    """Only what an export wrote is replaced: other files in the folder could not come back."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; only a folder can be replaced by this export.")
    for name in sorted(os.listdir(path)):
        weights = name.startswith("model") and name.endswith(".safetensors")
        if name not in (INDEX, "config.json") and not weights:
            raise CheckpointError(
                f"{path} holds {name}, which no export wrote and would be lost. Choose another "
                "folder, or move that file away."
            )


def _swap_folders(new: Path, old: Path) -> None:
    aside = old.with_name(f".{old.name}.{secrets.token_hex(4)}.tmp")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    shutil.rmtree(aside)


def _remove(temporary: Path) -> None:
    if temporary.is_dir():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a new file that holds ``value``."""
    with open(path, "xb") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")
        sync(file)


def sync(file: BinaryIO) -> None:
    """Make what was written survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def word(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")
