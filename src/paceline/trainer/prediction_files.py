"""Files of predictions, written as they come: ``.npy``, ``.npz``, ``.safetensors`` or ``.jsonl``.

None of them holds more than one batch in memory, and none executes code when it is read. What is
unfinished lies beside the file under a hidden name, and takes its name in one move at the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from paceline.engine.predicted_rows import Rows, by_name, count_of
from paceline.errors import TrainingError

_HEADER = 512
"""Bytes kept for the header of an .npy file, whose number of rows is known last."""

_NUMPY = {
    torch.float16: "f2", torch.float32: "f4", torch.float64: "f8",
    torch.int8: "i1", torch.int16: "i2", torch.int32: "i4", torch.int64: "i8",
    torch.uint8: "u1", torch.uint16: "u2", torch.uint32: "u4", torch.uint64: "u8",
    torch.bool: "b1", torch.complex64: "c8", torch.complex128: "c16",
}  # fmt: skip
_SAFETENSORS = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL",
}  # fmt: skip


class PredictionFile(ABC):
    """Takes rows in order; ``finish`` makes the file, ``discard`` leaves nothing of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        # Hidden, and without the suffix of what it is to become: it does not look whole.
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")

    def add(self, rows: Rows) -> None:
        """Write some more rows."""
        self._add(rows)
        self.rows += count_of(rows)

    @abstractmethod
    def _add(self, rows: Rows) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """All rows have come: put the file in its place."""

    def discard(self) -> None:
        """Take away what has been written."""
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _put_in_place(self) -> None:
        os.replace(self._part, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Column:
    """The rows of one tensor as plain bytes in a file, after ``reserve`` bytes for a header."""

    def __init__(self, path: Path, name: str, kinds: dict[torch.dtype, str], reserve: int) -> None:
        self.path, self.name, self._kinds = path, name, kinds
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 (until close)
        self._file.write(b"\0" * reserve)
        self.dtype: torch.dtype | None = None
        self.shape: tuple[int, ...] = ()
        self.rows = 0

    @property
    def kind(self) -> str:
        """The format's own word for the type of the elements."""
        assert self.dtype is not None
        return self._kinds[self.dtype]

    def add(self, tensor: Tensor) -> None:
        """Write some more rows."""
        if tensor.is_floating_point() and tensor.dtype not in self._kinds:
            tensor = tensor.float()  # numpy knows neither bfloat16 nor the types of 8 bits
        if tensor.dtype not in self._kinds:
            raise TrainingError(
                f"{self.name}: {tensor.dtype} cannot be written to a {_suffix(self.path)} file. "
                "Convert it with take=, or choose another of " + ", ".join(FORMATS)
            )
        shape = tuple(tensor.shape[1:])
        if self.dtype is None:
            self.dtype, self.shape = tensor.dtype, shape
        if (tensor.dtype, shape) != (self.dtype, self.shape):
            raise TrainingError(
                f"{self.name}: rows of {tensor.dtype} {shape} after rows of {self.dtype} "
                f"{self.shape} cannot make one array. Pad all batches to one length, take= "
                "something of equal shape, or write a .jsonl file, which takes rows of any shape."
            )
        self._file.write(_bytes_of(tensor))
        self.rows += len(tensor)

    def close(self, header: bytes = b"") -> None:
        """Write ``header`` to the start, and see that all is on the disk."""
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Take the file away."""
        with contextlib.suppress(OSError):
            self._file.close()
            self.path.unlink(missing_ok=True)


class _Npy(PredictionFile):
    """One array, for models that return one tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._column = _Column(self._part, "output", _NUMPY, _HEADER)

    def _add(self, rows: Rows) -> None:
        named = by_name(rows)
        if len(named) > 1:
            raise TrainingError(
                f"the model returns several tensors ({', '.join(named)}), and an .npy file holds "
                "one. Choose one with take=, or write an .npz, .safetensors or .jsonl file."
            )
        self._column.add(next(iter(named.values())))

    def finish(self) -> None:
        self._column.close(_npy_header(self._column))
        self._put_in_place()

    def discard(self) -> None:
        self._column.discard()


class _Columns(PredictionFile):
    """Several arrays by name: each in a file of its own, put together at the end."""

    kinds: dict[torch.dtype, str]
    reserve: int

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = self._part.with_suffix(".columns")
        self._folder.mkdir()
        self._columns: dict[str, _Column] = {}

    def _add(self, rows: Rows) -> None:
        named = by_name(rows)
        for name in named:
            if name not in self._columns and not self.rows:
                place = self._folder / f"{len(self._columns)}{self.path.suffix}"
                self._columns[name] = _Column(place, name, self.kinds, self.reserve)
        if named.keys() != self._columns.keys():
            raise TrainingError(
                f"the model returns {', '.join(named)} for one batch, and "
                f"{', '.join(self._columns)} for those before. Choose what all have with take=."
            )
        for name, tensor in named.items():
            self._columns[name].add(tensor)

    def finish(self) -> None:
        self._put_together(list(self._columns.values()))
        shutil.rmtree(self._folder)
        self._put_in_place()

    @abstractmethod
    def _put_together(self, columns: list[_Column]) -> None: ...

    def discard(self) -> None:
        for column in self._columns.values():
            column.discard()
        shutil.rmtree(self._folder, ignore_errors=True)
        super().discard()


class _Npz(_Columns):
    """Arrays by name, as ``numpy.load`` reads them."""

    kinds, reserve = _NUMPY, _HEADER

    def _put_together(self, columns: list[_Column]) -> None:
        with open(self._part, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for column in columns:
                    column.close(_npy_header(column))
                    archive.write(column.path, f"{column.name}.npy")
                    column.path.unlink()
            file.flush()
            os.fsync(file.fileno())


class _Safetensors(_Columns):
    """Tensors by name, with every dtype that torch models return."""

    kinds, reserve = _SAFETENSORS, 0

    def _put_together(self, columns: list[_Column]) -> None:
        header: dict[str, Any] = {}
        start = 0
        for column in columns:
            column.close()
            end = start + column.path.stat().st_size
            shape = [column.rows, *column.shape]
            header[column.name] = {
                "dtype": column.kind, "shape": shape, "data_offsets": [start, end],
            }  # fmt: skip
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self._part, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for column in columns:
                with open(column.path, "rb") as data:
                    shutil.copyfileobj(data, file, 1 << 20)
                column.path.unlink()
            file.flush()
            os.fsync(file.fileno())


class _JsonLines(PredictionFile):
    """One line a sample: its number in the data and its output, of any shape."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = open(self._part, "w", encoding="utf-8")  # noqa: SIM115 (until finish)

    def _add(self, rows: Rows) -> None:
        for name, tensor in by_name(rows).items():
            if tensor.is_complex():
                raise TrainingError(f"{name}: JSON has no complex numbers. Convert it with take=.")
        values = {name: _plain(tensor.tolist()) for name, tensor in by_name(rows).items()}
        for number in range(count_of(rows)):
            output: Any = {name: column[number] for name, column in values.items()}
            if isinstance(rows, Tensor):
                output = output["output"]
            line = json.dumps({"index": self.rows + number, "output": output}, allow_nan=False)
            self._file.write(f"{line}\n")

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._put_in_place()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        super().discard()


FORMATS: dict[str, Callable[[Path], PredictionFile]] = {
    ".npy": _Npy,
    ".npz": _Npz,
    ".safetensors": _Safetensors,
    ".jsonl": _JsonLines,
}
"""What predictions can be written to, by the suffix of the file."""


def check_out(out: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The path of the file to write; refused where it could not, or should not, be written."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise TrainingError(f"out={out!r} must be the path of a file.")
    path = Path(out).absolute()
    if _suffix(path) not in FORMATS:
        raise TrainingError(
            f"out={os.fspath(out)!r}: predictions are written to one of {', '.join(FORMATS)}, by "
            f"the end of the name, which is {path.suffix!r} here."
        )
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is not a folder"
        raise TrainingError(f"out={os.fspath(out)!r} {why}. Make the folder, or name another file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise TrainingError(f"out={os.fspath(out)!r}: {path.parent} cannot be written.")
    if path.exists() and not overwrite:
        raise TrainingError(
            f"out={os.fspath(out)!r} is there already. Name another file, or pass overwrite=True "
            "(--overwrite)."
        )
    return path


def open_predictions(path: Path) -> PredictionFile:
    """Begin the file ``path``, of the format that its name says."""
    return FORMATS[_suffix(path)](path)


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _npy_header(column: _Column) -> bytes:
    """The header in numpy's format 1.0, filled up with blanks to the length kept for it."""
    order = "|" if column.kind.endswith("1") else "<" if sys.byteorder == "little" else ">"
    shape = (column.rows, *column.shape)
    fields = f"{{'descr': '{order}{column.kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text = fields.encode("latin1").ljust(_HEADER - 11) + b"\n"
    assert len(text) == _HEADER - 10, "a tensor of that many dimensions"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _bytes_of(tensor: Tensor) -> Any:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def _plain(value: Any) -> Any:
    """``value`` as JSON takes it: it has no NaN and no infinity, which become text as in events."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
