"""Gradients of a sharded unit on their way to the ranks that keep their pieces.

Each rank sends every other one its piece of the gradient in a compressed form, and adds up what it
receives, in the order of the ranks. Nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.options import Form
from paceline.sync.compressed.exchange import Exchange
from paceline.sync.compressed.formats import Format, Turn
from paceline.sync.compressed.powersgd import PowerSGD
from paceline.sync.wire import ring_bytes


class CutParameter(NamedTuple):
    """A parameter that is cut along its first dimension, the last piece filled up with zeros."""

    name: str
    shape: tuple[int, ...]

    def piece(self, ranks: int) -> int:
        """How many elements a rank's piece has, with its filling."""
        rows = -(-self.shape[0] // ranks)
        return rows * (self.size // self.shape[0] if self.shape[0] else 0)

    @property
    def size(self) -> int:
        """How many elements it has."""
        total = 1
        for length in self.shape:
            total *= length
        return total

    def in_rows(self, whole: Tensor, ranks: int) -> Tensor:
        """The piece of each rank as a row."""
        rows = whole.new_zeros(ranks * self.piece(ranks))
        rows[: self.size] = whole.reshape(-1)
        return rows.view(ranks, -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The parameter without its filling."""
        return rows.reshape(-1)[: self.size].view(self.shape)


class Scatter:
    """The exchange of one unit, whose gradients lie in a row for each rank, ``cuts`` in order."""

    def __init__(self, exchange: Exchange, cuts: Sequence[CutParameter], slot: int) -> None:
        self._exchange = exchange
        self._cuts = list(cuts)
        self._slot = slot

    @torch.no_grad()
    def sum(self, gradients: Tensor) -> Tensor:
        """This rank's piece of the sum over all ranks of ``gradients``. A collective."""
        exchange = self._exchange
        ranks = exchange.wire.size
        exchange.plain += ring_bytes(gradients, ranks) / 2  # the way back is that of parameters
        rows = gradients.view(ranks, -1)
        sizes = [cut.piece(ranks) for cut in self._cuts]
        assert sum(sizes) == rows.shape[1], (sizes, rows.shape)
        due = {}
        for cut, own in zip(self._cuts, rows.split(sizes, dim=1), strict=True):
            due[cut.name] = exchange.due(cut.name, cut.from_rows(own))
        total = torch.empty_like(rows[0])
        places = dict(zip(due, total.split(sizes), strict=True))
        for number, (form, names) in enumerate(exchange.by_form(due)):
            turn = Turn(exchange.step, self._slot * ranks * 64 + number)
            self._send(form, {n: due[n] for n in names}, places, turn)
        return total

    def _send(
        self, form: Form, due: Mapping[str, Tensor], places: Mapping[str, Tensor], turn: Turn
    ) -> None:
        exchange, ranks = self._exchange, self._exchange.wire.size
        codec = exchange.format_of(form)
        assert not isinstance(codec, PowerSGD)
        chosen = [cut for cut in self._cuts if cut.name in due]
        rows = torch.cat([cut.in_rows(due[cut.name], ranks) for cut in chosen], dim=1)
        sizes = [cut.piece(ranks) for cut in chosen]
        turns = [turn._replace(slot=turn.slot + 64 * rank) for rank in range(ranks)]
        packed = [codec.pack(row, t) for row, t in zip(rows, turns, strict=True)]
        total = self._added(codec, exchange.wire.swap(packed), rows, turns[exchange.wire.rank])
        for cut, part in zip(chosen, total.split(sizes), strict=True):
            places[cut.name].copy_(part)
        if not exchange.feeds_back(codec):
            for cut in chosen:
                exchange.leave(cut.name, None)
            return
        unpacked = [
            codec.unpack(p, r.numel(), r.dtype, t)
            for p, r, t in zip(packed, rows, turns, strict=True)
        ]
        left = rows - torch.stack(unpacked)
        for cut, rest in zip(chosen, left.split(sizes, dim=1), strict=True):
            exchange.leave(cut.name, cut.from_rows(rest))

    def _added(self, codec: Format, messages: Sequence[Tensor], rows: Tensor, turn: Turn) -> Tensor:
        total = torch.zeros_like(rows[0])
        for message in messages:
            total += codec.unpack(message, total.numel(), total.dtype, turn)
        return total
