"""Text with no download: the Python standard library's own source, as bytes."""

from __future__ import annotations

import os
import sysconfig
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from paceline.data.arguments import whole_number
from paceline.errors import DataError

# Installed packages are no part of the standard library; tests and tables of characters are no
# text worth learning.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
# Written when Python was built, and different on every machine.
_SKIPPED_FILES = "_sysconfigdata"


class ByteText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Text as windows of bytes: item i is ``(input, target)``, two int64 tensors of ``context``.

    The target is the input moved on by one byte. Windows follow each other without overlap, so an
    epoch predicts each byte once; a last piece shorter than a window is left out. ``data`` is
    bytes, anything that exposes its memory like bytes, or a one-dimensional uint8 tensor.
    """

    def __init__(self, data: Any, context: int) -> None:
        self.context = whole_number("context", context, 1, "length of a window in bytes")
        self.data = _as_tensor(data)
        if len(self) == 0:
            raise DataError(
                f"context={context} needs a text of at least {context + 1} bytes, but this one has "
                f"{self.data.numel()}. Take a shorter context or a longer text."
            )

    def __len__(self) -> int:
        return max(0, self.data.numel() - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} is outside this text's {len(self)} windows")
        start = (index % len(self)) * self.context
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def stdlib_source(
    context: int = 128, max_bytes: int | None = None, val_fraction: float = 0.05
) -> tuple[ByteText, ByteText]:
    """Training and validation text from the source of this machine's Python standard library.

    Whole files go to one or the other, chosen by a hash of their name: no file is in both, and the
    choice is the same on every machine with the same Python. ``max_bytes`` limits the two together.
    """
    if not isinstance(val_fraction, int | float) or not 0 < val_fraction < 1:
        raise DataError(
            f"val_fraction={val_fraction!r} must lie between 0 and 1: it is the part of the text "
            "kept for validation."
        )
    least = 4 * (whole_number("context", context, 1, "length of a window in bytes") + 1)
    if max_bytes is not None:
        whole_number("max_bytes", max_bytes, least, "most bytes to read, enough for four windows")
    folder = Path(sysconfig.get_path("stdlib"))
    texts = _read(folder, _by_hash(folder), max_bytes)
    wanted = max(context + 1, round(val_fraction * sum(map(len, texts.values()))))
    val: dict[str, bytes] = {}
    for name, text in texts.items():
        if sum(map(len, val.values())) >= wanted:
            break
        val[name] = text
    train = {name: text for name, text in texts.items() if name not in val}
    if sum(map(len, train.values())) <= context:
        raise DataError(
            f"the Python source in {folder} comes to {sum(map(len, texts.values()))} bytes in "
            f"{len(texts)} files: too little to split at val_fraction={val_fraction} and "
            f"context={context}. Take a shorter context, a smaller val_fraction or more bytes."
        )
    return _joined(train, context), _joined(val, context)


def unigram_loss(train: ByteText, val: ByteText) -> float:
    """Nats per byte of the best model that ignores context: byte frequencies of ``train``.

    Measured on the bytes that ``val`` asks to predict. A model that has learnt anything about order
    is below this. Bytes that ``train`` never shows count as seen once.
    """
    counts = torch.bincount(train.data.long(), minlength=256).double() + 1
    log_probability = (counts / counts.sum()).log()
    targets = val.data[1 : len(val) * val.context + 1].long()
    return float(-log_probability[targets].mean())


def _as_tensor(data: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise DataError(
                f"the text is a {data.dim()}-dimensional {data.dtype} tensor: give a "
                "one-dimensional torch.uint8 tensor of bytes."
            )
        return data
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise DataError(
            f"the text is a {type(data).__name__}: give bytes or a torch.uint8 tensor. For a str, "
            "say text.encode()."
        ) from None
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch shares memory it may write to; read-only bytes are copied once.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _by_hash(folder: Path) -> list[Path]:
    """The standard library's files, in an order that mixes its parts and never changes."""
    files: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [
            Path(where, name)
            for name in names
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES)
        ]
    if not files:
        raise DataError(
            f"no Python source found in {folder}: this Python was installed without it (zipped or "
            "stripped). Use a Python with its standard library's .py files, or another dataset."
        )
    return sorted(files, key=lambda path: blake2b(_name(folder, path).encode()).digest())


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read(folder: Path, files: list[Path], max_bytes: int | None) -> dict[str, bytes]:
    """The files' contents by name; the last one is cut short where ``max_bytes`` ends."""
    texts: dict[str, bytes] = {}
    total = 0
    for path in files:
        text = path.read_bytes()
        if max_bytes is not None and total + len(text) > max_bytes:
            text = text[: max_bytes - total]
        if text:
            texts[_name(folder, path)] = text
        total += len(text)
        if max_bytes is not None and total >= max_bytes:
            break
    return texts


def _joined(texts: dict[str, bytes], context: int) -> ByteText:
    return ByteText(b"".join(texts[name] for name in sorted(texts)), context)
