"""A copy of a rank's state in host memory, made as fast as memory allows."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.rank_state import Part, Piece, RankState, check_piece
from paceline.checkpoint.sharded.save_plan import aligned
from paceline.errors import CheckpointError

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class HostCopy:
    """One buffer that a state is copied into, again and again.

    It grows to the largest state it was given and is kept until ``free``. It is pinned where
    the state has CUDA tensors, if the system lets us: see ``pinned``.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostCopy] | None = None
        self._structure: list[Any] | None = None
        self._copies: dict[str, Part] = {}

    @property
    def size(self) -> int:
        """How many bytes the buffer has."""
        return self._buffer.numel()

    @property
    def pinned(self) -> bool:
        """Whether copies from CUDA go without a detour."""
        return self._unpin is not None

    def reserve(self, state: RankState) -> None:
        """Make room for ``state``, so that the first ``take`` is as fast as any other."""
        size = sum(_room(piece.tensor) for piece in _pieces(state.tensors))
        on_cuda = _on_cuda(state)
        if size <= self._buffer.numel() and (self.pinned or not on_cuda):
            return
        self.free()  # before the new one is made: never two at once
        try:
            buffer = torch.empty(size, dtype=torch.uint8)
            # The system hands out memory page by page when it is first touched: now, not later.
            buffer.zero_()
        except RuntimeError as error:
            raise CheckpointError(
                f"no memory for a copy of the state: {size} bytes. Use less memory elsewhere, or "
                f"spread the state over more ranks. ({error})"
            ) from error
        self._buffer = buffer
        if on_cuda and pin_memory(buffer):
            self._unpin = weakref.finalize(self, _release, buffer.data_ptr())

    @torch.no_grad()
    def take(self, state: RankState) -> RankState:
        """A copy of ``state``: its tensors are in the buffer, until the next call.

        When this returns, what ``state`` holds may change.
        """
        objects = {name: _copied(name, value) for name, value in state.objects.items()}
        self._lay_out(state)
        # Nothing but copies from here on: other work between them would find the caches empty.
        copy_all(
            [piece.tensor for piece in _pieces(state.tensors)],
            [piece.tensor for piece in _pieces(self._copies)],
        )
        return RankState(dict(self._copies), objects)

    def free(self) -> None:
        """Give the memory back. What ``take`` returned keeps it alive while it is in use."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._structure, self._copies = None, {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _lay_out(self, state: RankState) -> None:
        """Have a place in the buffer for every piece of ``state``; they serve until it changes."""
        structure = state.structure()
        if structure == self._structure:
            return
        for name, part in state.tensors.items():
            for piece in part.pieces:
                check_piece(name, part, piece)
        self.reserve(state)
        self._structure, self._copies = None, {}
        at = 0
        for name, part in state.tensors.items():
            pieces = []
            for piece in part.pieces:
                room = self._buffer[at : at + piece.tensor.numel() * part.dtype.itemsize]
                pieces.append(Piece(piece.box, room.view(part.dtype).view(piece.tensor.shape)))
                at += _room(piece.tensor)
            self._copies[name] = Part(part.shape, part.dtype, tuple(pieces))
        self._structure = structure


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target; done when it returns, on whichever device they were."""
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _pieces(tensors: Mapping[str, Part]) -> list[Piece]:
    return [piece for part in tensors.values() for piece in part.pieces]


def _on_cuda(state: RankState) -> bool:
    return any(piece.tensor.is_cuda for piece in _pieces(state.tensors))


def _room(tensor: Tensor) -> int:
    return aligned(tensor.numel() * tensor.element_size())


def _copied(name: str, value: object) -> object:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever an object's own methods raise
        raise CheckpointError(
            f"object {name!r} cannot be copied: {type(error).__name__}: {error}. Let it hold "
            "tensors, numbers, strings, lists and dicts only."
        ) from error


def pin_memory(buffer: Tensor) -> bool:
    """Lock the pages of ``buffer`` in place for the GPU; false where the system refuses.

    Registered rather than allocated as pinned: torch's allocator for that rounds up to a power of
    two and does not give back.
    """
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), _FOR_ALL_DEVICES)) == 0:
        return True
    _forget_refusal()
    return False


def _forget_refusal() -> None:
    """CUDA keeps its last error, and torch would blame the training's next kernel for it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


def _release(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
