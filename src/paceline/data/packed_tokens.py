"""Token files: documents packed to full sequences, without a copy of them in memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from paceline.data.arguments import whole_number
from paceline.data.packing import Packing, pack_whole
from paceline.data.shard_files import ShardFile, file_names, suffix_of
from paceline.errors import DataError

IGNORED = -100
"""The target of a token that predicts nothing: the last of its document, and padding."""
NO_DOCUMENT = -1
"""The document of padding."""
_SCANNED_AT_ONCE = 1 << 26

Tokens = npt.NDArray[np.int64]


class PackedSequence(NamedTuple):
    """One sequence of ``context`` tokens: the inputs of a model, and last what it is to predict.

    ``documents`` numbers the documents in the sequence, so that tokens attend only to their own;
    ``positions`` start at 0 in each.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    targets: torch.Tensor


class PackedTokens(Dataset[PackedSequence]):
    """Documents in files of tokens, packed to sequences of ``context`` tokens.

    Item i is a ``PackedSequence`` of int64 tensors. Documents follow each other; one that does not
    fit goes on in the next sequence, so that nothing but the very last sequence is padded. With
    ``whole=True`` only documents longer than ``context`` are cut, and the others are put together
    so that little is left; ``waste`` is the part that is padding.

    - ``files``: a path, URL or pattern, or a list: ``.npy`` with one dimension of whole numbers, or
      anything else as raw numbers of type ``dtype``.
    - ``end``: the token that ends a document, part of it. Without it, each file is one document.

    Files are mapped into memory, not loaded. ``whole=True`` reads them once to find the documents.
    """

    def __init__(
        self,
        files: Any,
        context: int,
        *,
        end: int | None = None,
        whole: bool = False,
        dtype: str = "uint16",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.context = whole_number("context", context, 1, "length of a sequence in tokens")
        if end is not None:
            whole_number("end", end, 0, "token that ends a document")
        self.end = end
        self._files = file_names(files, storage_options)
        self._dtype = _number_type(dtype)
        self._storage_options = storage_options
        self._maps: dict[int, npt.NDArray[Any]] = {}
        self._process = os.getpid()
        self._lengths = [len(self._mapped(file)) for file in range(len(self._files))]
        self._ends = list(accumulate(self._lengths))
        if self._ends[-1] == 0:
            raise DataError(f"the {len(self._files)} token files hold no token.")
        self._packing: Packing | None = None
        if whole:
            self._packing = pack_whole(self._document_ends(), self.context)

    @property
    def tokens(self) -> int:
        """Tokens in all files."""
        return self._ends[-1]

    @property
    def waste(self) -> float:
        """The part of all sequences that is padding."""
        return 1 - self.tokens / (len(self) * self.context)

    def __len__(self) -> int:
        if self._packing is not None:
            return len(self._packing)
        return -(-self.tokens // self.context)

    def __getitem__(self, index: int) -> PackedSequence:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[PackedSequence]:
        """Several sequences at once, as a DataLoader asks for them."""
        parts = self._sequences([self._pieces(index) for index in indices])
        return [PackedSequence(*rows) for rows in zip(*map(torch.from_numpy, parts), strict=True)]

    def _pieces(self, index: int) -> list[tuple[int, int]]:
        """The stretches of all tokens that sequence ``index`` is made of."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} is outside the {len(self)} of these tokens")
        index %= len(self)
        if self._packing is not None:
            return self._packing.pieces(index)
        start = index * self.context
        return [(start, min(start + self.context, self.tokens))]

    def _sequences(self, packs: list[list[tuple[int, int]]]) -> tuple[Tokens, ...]:
        """The parts of several sequences, a row for each."""
        shape = (len(packs), self.context)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        begins, ends = np.zeros(shape, bool), np.zeros(shape, bool)
        filled = np.zeros((len(packs), 1), np.int64)
        for row, pieces in enumerate(packs):
            at = 0
            for start, stop in pieces:
                self._copy(start, tokens[row, at : at + stop - start])
                after = min(stop + 1, self.tokens)
                self._copy(start + 1, targets[row, at : at + after - start - 1])
                begins[row, at] = True
                ends[row, [at + end - start - 1 for end in self._file_ends(start, stop)]] = True
                at += stop - start
            filled[row] = at
        if self.end is not None:
            ends |= tokens == self.end
        targets[ends] = IGNORED
        begins[:, 1:] |= ends[:, :-1]
        places = np.arange(self.context)
        documents = begins.cumsum(1) - 1
        positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        padding = places >= filled
        documents[padding], positions[padding] = NO_DOCUMENT, 0
        return tokens, positions, documents, targets

    def _file_ends(self, start: int, stop: int) -> list[int]:
        """The ends of files after ``start`` and up to ``stop``: documents end there, too."""
        first = bisect_right(self._ends, start)
        return self._ends[first : bisect_right(self._ends, stop)]

    def _document_ends(self) -> Tokens:
        """Where each document ends, counted through all files."""
        found = [np.array(self._ends)]
        if self.end is not None:
            for file, length in enumerate(self._lengths):
                base = self._ends[file] - length
                for start in range(0, length, _SCANNED_AT_ONCE):
                    part = self._mapped(file)[start : start + _SCANNED_AT_ONCE]
                    found.append(np.flatnonzero(part == self.end) + (base + start + 1))
        ends = np.unique(np.concatenate(found))
        return ends[ends > 0]

    def _copy(self, start: int, out: Tokens) -> None:
        """Fill ``out`` with the tokens from ``start`` on, out of one file or several."""
        at, file = 0, bisect_right(self._ends, start)
        while at < len(out):
            inside = start + at - (self._ends[file] - self._lengths[file])
            part = self._mapped(file)[inside : inside + len(out) - at]
            out[at : at + len(part)] = part
            at, file = at + len(part), file + 1

    def _mapped(self, file: int) -> npt.NDArray[Any]:
        if self._process != os.getpid():
            self._maps, self._process = {}, os.getpid()
        if file not in self._maps:
            self._maps[file] = _map(
                ShardFile(self._files[file], self._storage_options), self._dtype
            )
        return self._maps[file]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # else the tokens would travel


def _number_type(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iu":
        raise DataError(
            f"dtype={name!r} must be a type of whole numbers, like 'uint16' or 'int32'."
        )
    return dtype


def _map(opened: ShardFile, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The numbers in a file, mapped into memory; the map keeps what it needs of the file."""
    start, count = 0, opened.size // dtype.itemsize
    if suffix_of(opened.name) == ".npy":
        dtype, start, count = _npy_header(opened)
    if opened.size - start != count * dtype.itemsize:
        raise DataError(
            f"{opened.shown} has {opened.size} bytes, which is no whole number of {dtype.name} "
            "tokens. It is cut short, or dtype= is another."
        )
    if not count:
        return np.zeros(0, dtype)
    # As a plain array over the same pages: slices of a memmap cost several times as much.
    return np.asarray(np.memmap(opened.file, dtype, "r", start, (count,)))


def _npy_header(opened: ShardFile) -> tuple[np.dtype[Any], int, int]:
    file, headers = opened.file, np.lib.format
    try:
        version = headers.read_magic(file)
        read = headers.read_array_header_1_0 if version == (1, 0) else headers.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise DataError(f"{opened.shown} is no .npy file: {error}.") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{opened.shown} holds {dtype} of shape {shape}: tokens are whole numbers in one "
            "dimension."
        )
    return dtype, file.tell(), shape[0]
