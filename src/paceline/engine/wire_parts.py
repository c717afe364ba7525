"""What compressed gradients leave behind, as part of a checkpoint and of an engine's state.

Each data-parallel rank has residuals of its own: a world with as many of them goes on to the bit.
Any other gives every rank the mean of what all had left. What will be applied is the mean over the
ranks, so nothing of it is lost, and nothing counts twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.boxes import Box, boxes_of
from paceline.checkpoint.manifest import TensorEntry
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.parallel.whole import held_runs, local, part_of

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.parts import Load, Saved

PREFIX = "compress/"
_KEPT, _RIGHT = "kept", "right"


class WireParts:
    """Collects and takes over for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.notes: list[str] = []
        """What there is to tell the user of a checkpoint that was taken over."""

    def collect(self, state: RankState) -> None:
        """Add what this rank has to ``state``."""
        engine = self._engine
        if engine.wiring is None:
            return
        memory = engine.wiring.exchange.memory
        for name, residual in memory.residuals.items():
            state.tensors[self._residual(engine.place.dp, name)] = self._part(residual, name)
        for name, right in memory.right.items():
            state.tensors[self._right(name)] = whole_part(right)
        for kept in memory.kept.values():
            for name, first, values in kept.parts():
                size = kept.sizes[name]
                piece = Piece(Box((first,), (len(values),)), values)
                state.tensors[f"{PREFIX}{_KEPT}/{name}"] = Part((size,), values.dtype, (piece,))

    def about(self) -> dict[str, Any] | None:
        """What a loader has to know beside the tensors."""
        layout = self._engine.layout
        return None if self._engine.wiring is None else {"dp": layout.dp, "tp": layout.tp}

    def take(self, saved: Saved, about: Mapping[str, Any] | None, load: Load) -> None:
        """Take over what a checkpoint holds; to be called once the model is spread."""
        self.notes = []
        wiring = self._engine.wiring
        there = {n: e for n, e in saved.manifest.tensors.items() if n.startswith(PREFIX)}
        if about is None or not there:
            return
        if wiring is None:
            self._warn()
            return
        exchange = wiring.exchange
        exchange.memory.residuals.clear()
        exchange.memory.kept.clear()
        if about["tp"] == self._engine.layout.tp:
            exchange.memory.right = self._load_whole(there, self._right(""), load)
        kept = self._load_whole(there, f"{PREFIX}{_KEPT}/", load)
        if about["dp"] == self._engine.layout.dp:
            exchange.memory.residuals = self._load_residuals(self._engine.place.dp, there, load)
            exchange.loaded_kept = kept
            return
        for old in range(about["dp"]):
            for name, residual in self._load_residuals(old, there, load).items():
                mean = exchange.memory.residuals.setdefault(name, torch.zeros_like(residual))
                mean.add_(residual, alpha=1 / about["dp"])
        for name, values in kept.items():
            if name in exchange.memory.residuals:
                residual = exchange.memory.residuals[name]
                residual.view(-1).add_(values.to(residual))
        if any(name.startswith(self._residual(0, "")) for name in there):
            self.notes.append(_told(about["dp"], self._engine.layout.dp))

    def whole(self) -> dict[str, Tensor] | None:
        """The mean over the ranks of what they have not sent, for the whole model. A collective."""
        wiring = self._engine.wiring
        if wiring is None:
            return None
        group, size = wiring.exchange.wire.group, wiring.exchange.wire.size
        found: dict[str, Tensor] = {}
        for name, residual in wiring.exchange.memory.residuals.items():
            mean = residual.clone()
            for kept in wiring.exchange.memory.kept.values():
                for kept_name, first, values in kept.parts():
                    if kept_name == name:
                        mean.view(-1)[first : first + len(values)].add_(values, alpha=size)
            if size > 1:
                dist.all_reduce(mean, group=group)
                mean.div_(size)
            found[name] = self._like_parameter(mean, name)
        return self._engine._state.merged_whole(found)

    def take_whole(self, residuals: Mapping[str, Tensor] | None) -> None:
        """Take over what :meth:`whole` gave."""
        if self._engine._spread is None and residuals:
            self._engine.after_spreading = lambda: self.take_whole(residuals)
            return
        wiring = self._engine.wiring
        if wiring is None:
            if residuals:
                self._warn()
            return
        memory = wiring.exchange.memory
        memory.residuals.clear()
        memory.kept.clear()
        for name, whole in (residuals or {}).items():
            if (parameter := self._parameters().get(name)) is not None:
                own = part_of(whole, parameter) if self._is_cut else whole
                memory.residuals[name] = own.to(local(parameter).device, copy=True)

    @property
    def _is_cut(self) -> bool:
        """Whether a residual is that of a part of a parameter: of tensor-parallel ones alone.

        What ``zero`` cuts is cut on its way, so that its residuals are whole.
        """
        return self._engine.layout.tp > 1

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: own[0] for name, own in self._engine.spread.held.items()}

    def _like_parameter(self, residual: Tensor, name: str) -> Tensor:
        parameter = self._parameters()[name]
        if not self._is_cut:
            return residual
        made = torch.empty_like(parameter, dtype=residual.dtype, requires_grad=False)
        local(made).copy_(residual)
        return made

    def _part(self, residual: Tensor, name: str) -> Part:
        if not self._is_cut:
            return whole_part(residual)
        parameter = self._parameters()[name]
        pieces = tuple(
            Piece(box, residual[inner.slices()] if residual.ndim else residual)
            for box, inner in boxes_of(held_runs(parameter))
        )
        return Part(tuple(parameter.shape), residual.dtype, pieces)

    def _load_residuals(
        self, dp: int, there: Mapping[str, TensorEntry], load: Load
    ) -> dict[str, Tensor]:
        """Those of the data-parallel rank ``dp``, for the parameters that this rank holds."""
        found: dict[str, Tensor] = {}
        parts: dict[str, Part] = {}
        for name, parameter in self._parameters().items():
            entry = there.get(self._residual(dp, name))
            if entry is None:
                continue
            shape = local(parameter).shape if self._is_cut else parameter.shape
            dtype = getattr(torch, entry.dtype)
            found[name] = torch.zeros(shape, dtype=dtype, device=local(parameter).device)
            parts[self._residual(dp, name)] = self._part(found[name], name)
        load(parts)
        return found

    def _load_whole(
        self, there: Mapping[str, TensorEntry], prefix: str, load: Load
    ) -> dict[str, Tensor]:
        """The tensors under ``prefix`` for the parameters of this rank, by parameter."""
        entries = {n: there[prefix + n] for n in self._parameters() if prefix + n in there}
        found = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries.items()
        }
        load({prefix + name: whole_part(tensor) for name, tensor in found.items()})
        device = self._engine.device
        return {name: tensor.to(device) for name, tensor in found.items()}

    def _residual(self, dp: int, name: str) -> str:
        return f"{PREFIX}{dp}/{name}"

    def _right(self, name: str) -> str:
        """Factors of tensor-parallel parts are those of one part each."""
        return f"{PREFIX}{_RIGHT}/{self._engine.place.tp}/{name}"

    def _warn(self) -> None:
        warnings.warn(
            "the saved run compressed its gradients and had not sent all of them yet; this engine "
            "does not compress (compress=None), so that this rest is left out. Resume with the "
            "same compress, or ignore this: it is about the size of one step.",
            stacklevel=2,
        )


def _told(before: int, now: int) -> str:
    """What became of what was left, where the ranks are more or fewer than they were."""
    if now == 1:
        then = "the one rank adds the mean of what all had not sent yet to its next step"
    else:
        then = "every rank goes on with the mean of what all had not sent yet"
    return (
        f"compressed gradients: {before} data-parallel rank{'s' * (before != 1)} before, {now} "
        f"now: {then}, "
        "so that nothing is lost and nothing counts twice"
    )
