"""Images, histograms and texts of a run: files in its folder, each told by an event.

Events stay small, and trackers read the files. Everything here is rank 0's, but for histograms that
are gathered.
"""

from __future__ import annotations

import json
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import TrainingError
from paceline.events import MediaLogged, Note
from paceline.formatting import size
from paceline.parallel.dtensor import whole
from paceline.untrusted import MIB
from paceline.world import World, collectives

FOLDER = "media"
MOST_PIXELS = 4096 * 4096
LONGEST_TEXT = 256 * 1024
MOST_BINS = 1024
MOST_RUN_BYTES = 1024 * MIB
"""What the files of one run may take together; what comes later is not kept, and that is said."""
_CHUNK = 1 << 22
_CHANNELS = {1: 0, 3: 2, 4: 6}  # by their number: how PNG calls them


class MediaWriter:
    """Writes to ``media/`` in ``folder`` (without one, to one that goes when it is closed)."""

    def __init__(
        self, folder: Path | None, world: World, step: Callable[[], int], emit: Callable[..., None]
    ) -> None:
        self._temporary = None
        self.world, self._step, self._emit = world, step, emit
        if folder is None and world.is_main:
            self._temporary = tempfile.TemporaryDirectory(prefix="paceline-media-")
            folder = Path(self._temporary.name)
        self.root = folder
        self._bytes: int | None = None
        self._is_full = False

    def image(self, name: str, image: Any, caption: str) -> None:
        """See ``Trainer.log_image``."""
        check_name(name, "log_image")
        data = png(pixels(name, image)) if self.world.is_main else b""
        self._write(name, "image", data, caption)

    def text(self, name: str, text: Any) -> None:
        """See ``Trainer.log_text``."""
        check_name(name, "log_text")
        if not isinstance(text, str):
            raise TrainingError(f"log_text({name!r}): got {type(text).__name__}, not text.")
        if len(text) > LONGEST_TEXT:
            left_out = len(text) - LONGEST_TEXT
            text = f"{text[:LONGEST_TEXT]}\n… ({left_out} more characters were left out)"
        self._write(name, "text", text.encode("utf-8", "replace"))

    def histogram(self, name: str, values: Any, bins: int, gather: bool) -> None:
        """See ``Trainer.log_histogram``."""
        check_name(name, "log_histogram")
        if isinstance(bins, bool) or not isinstance(bins, int) or not 1 <= bins <= MOST_BINS:
            raise TrainingError(f"log_histogram({name!r}): bins={bins!r} must be 1 to {MOST_BINS}.")
        try:
            tensor = values if isinstance(values, Tensor) else torch.as_tensor(_array(values))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(
                f"log_histogram({name!r}): {type(values).__name__} is no tensor ({error})."
            ) from None
        if tensor.is_complex():
            raise TrainingError(f"log_histogram({name!r}): complex numbers have no order.")
        gathered = gather and self.world.size > 1
        if isinstance(tensor, DTensor):  # part of it is here: all ranks put it together
            tensor, gathered = whole(tensor), False
        if gathered or self.world.is_main:
            found = counted(tensor, bins, gathered)
            self._write(name, "histogram", json.dumps(found).encode())

    def close(self) -> None:
        """Take away what no run folder keeps; trackers have read it."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _write(self, name: str, kind: str, data: bytes, caption: str = "") -> None:
        if not self.world.is_main:
            return
        assert self.root is not None
        folder = self.root / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._bytes is None:
                self._bytes = sum(file.stat().st_size for file in folder.iterdir())
            self._bytes += len(data)
            if self._bytes > MOST_RUN_BYTES:
                self._refuse(f"{folder} holds {size(MOST_RUN_BYTES)}, the most that a run keeps")
                return
            file = f"{FOLDER}/{_file_name(self._step(), name, kind)}"
            (self.root / file).write_bytes(data)
        except OSError as error:  # a full disk does not end a run
            self._refuse(f"{folder} cannot be written ({error.strerror or error})")
            return
        self._is_full = False
        self._emit(MediaLogged(step=self._step(), name=name, what=kind, file=file, caption=caption))

    def _refuse(self, why: str) -> None:
        """Say once that something was not kept, until there is room again."""
        if not self._is_full:
            self._is_full = True
            told = f"{why}: images, histograms and texts are not kept from step {self._step()} on"
            self._emit(Note(message=told, level="warning"))


def check_name(name: Any, call: str) -> None:
    """Refuse what is no name."""
    if not isinstance(name, str) or not name:
        raise TrainingError(f"{call}: name={name!r} must be text.")


def _file_name(step: int, name: str, kind: str) -> str:
    """A name that every file system takes, and that no other logged name has."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:60].strip("-")
    mark = f"{zlib.crc32(name.encode('utf-8', 'replace')):08x}"
    ending = {"image": "png", "text": "txt", "histogram": "json"}[kind]
    return f"{step:09d}-{safe or kind}-{mark}.{ending}"


def pixels(name: str, image: Any) -> Tensor:
    """An image as bytes of height × width × channels."""
    is_tensor = isinstance(image, Tensor)
    try:
        found = image.detach().cpu() if is_tensor else torch.as_tensor(_array(image))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(
            f"log_image({name!r}): {type(image).__name__} is no image ({error}). Give a tensor of "
            "channels × height × width, an array of height × width × channels, or a PIL image."
        ) from None
    if found.ndim == 2:
        found = found.unsqueeze(-1)
    elif found.ndim == 3 and is_tensor:
        found = found.permute(1, 2, 0)
    if found.ndim != 3 or found.shape[-1] not in _CHANNELS or 0 in found.shape:
        order = "channels × height × width" if is_tensor else "height × width × channels"
        raise TrainingError(
            f"log_image({name!r}): the shape {tuple(image.shape)} is no image. It is {order} with "
            "1, 3 or 4 channels, or height × width. Of several images make one, such as by "
            "torchvision.utils.make_grid."
        )
    if found.shape[0] * found.shape[1] > MOST_PIXELS:
        raise TrainingError(
            f"log_image({name!r}): {found.shape[1]} × {found.shape[0]} pixels are more than "
            f"{MOST_PIXELS:,}, the most that are kept. Make it smaller first."
        )
    if found.dtype == torch.bool:
        found = found.to(torch.uint8) * 255
    elif found.is_floating_point():  # 0 is black, 1 is full
        found = found.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    return found.clamp(0, 255).to(torch.uint8).contiguous()


def _array(given: Any) -> Any:
    import numpy as np

    array = np.asarray(given)
    if array.dtype.kind not in "biufc":
        raise TypeError("it has no numbers")
    return np.ascontiguousarray(array)


def png(image: Tensor) -> bytes:
    """Bytes of height × width × channels as a PNG file."""
    height, width, channels = image.shape
    rows = torch.zeros(height, 1 + width * channels, dtype=torch.uint8)  # each row begins with 0
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.numpy().tobytes())), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def counted(tensor: Tensor, bins: int, gather: bool) -> dict[str, Any]:
    """How many values are in each bin; with ``gather``, of all ranks together (a collective)."""
    flat = tensor.detach().reshape(-1)
    least, most, sums = _extent(flat)
    if gather:
        every = collectives.all_gather_object((least, most, sums))
        least, most = min(one[0] for one in every), max(one[1] for one in every)
        sums = [sum(column) for column in zip(*(one[2] for one in every), strict=True)]
    if least > most:  # nothing finite at all
        least = most = 0.0
    if least == most:
        least, most = least - 0.5, most + 0.5
    part = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    edges = least * (1 - part) + most * part  # their difference may be too large for a float
    counts = torch.zeros(bins, dtype=torch.float64)
    for chunk in _chunks(flat):
        place = torch.searchsorted(edges, chunk[chunk.isfinite()], right=True) - 1
        counts += torch.bincount(place.clamp(0, bins - 1), minlength=bins)
    if gather:
        counts = sum(collectives.all_gather_object(counts), torch.zeros_like(counts))
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "sum": sums[0],
        "sum_squares": sums[1],
        "not_finite": sums[2],
    }


def _chunks(flat: Tensor) -> Any:
    """A few at a time as float64: a copy of all of a large model's weights may be too much."""
    return (chunk.cpu().double() for chunk in flat.split(_CHUNK))


def _extent(flat: Tensor) -> tuple[float, float, list[float]]:
    """Least and most; the sum, the sum of squares, and how many are not finite."""
    least, most, sums = float("inf"), float("-inf"), [0.0, 0.0, 0.0]
    for chunk in _chunks(flat):
        finite = chunk[chunk.isfinite()]
        sums[2] += chunk.numel() - finite.numel()
        if finite.numel():
            least, most = min(least, finite.min().item()), max(most, finite.max().item())
            sums[0] += finite.sum().item()
            sums[1] += finite.square().sum().item()
    return least, most, sums
