"""Checkpoints of runs that average gradients: residuals of compression, and how sums go.

Each data-parallel rank has residuals of its own: a world with as many goes on bitwise-identically.
Any other gives every rank the mean of what all had left. What will be applied is the mean over the
ranks, so nothing of it is lost, and nothing counts twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.boxes import Box, boxes_of
from paceline.checkpoint.manifest import TensorEntry
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.saveable import Load, Saved
from paceline.parallel.dtensor import held_runs, local, part_of
from paceline.sync.averaging import GradientAveraging
from paceline.sync.protocol import Merge
from paceline.sync.reduction import ReductionChoice
from paceline.sync.replica import Replica

OPTIMIZER = "optimizer/"
OUTER = "outer"
"""The outer optimizer of local SGD, in a checkpoint."""
PREFIX = "compress/"
_KEPT, _RIGHT = "kept", "right"


class SynchronousState:
    """See ``SyncState``."""

    keeps_optimizer = False
    optimizer_prefix = OPTIMIZER

    def __init__(self, replica: Replica, reduction: ReductionChoice) -> None:
        self._replica, self._reduction = replica, reduction
        self.notes: list[str] = []
        """What there is to tell the user of a checkpoint that was taken over."""

    @property
    def _averaging(self) -> GradientAveraging | None:
        return self._reduction.averaging

    def shared(self, name: str, own: Tensor) -> Tensor:
        """Every replica has the same."""
        return own

    def optimizer_source(self, saved: Saved) -> str:
        """Where any layout's is."""
        return OPTIMIZER

    def about(self) -> dict[str, Any]:
        """What a loader has to know beside the tensors."""
        layout = self._replica.layout
        return {
            "compress": None if self._averaging is None else {"dp": layout.dp, "tp": layout.tp},
            "reduction": self._reduction.state(),
        }

    def collect(self, state: RankState, buffers: Mapping[str, Tensor]) -> None:
        """Add this rank's residuals, and what its formats go on from."""
        if self._averaging is None:
            return
        memory, place = self._averaging.exchange.memory, self._replica.coordinate
        for name, residual in memory.residuals.items():
            state.tensors[self._residual(place.dp, name)] = self._part(residual, name)
        for name, right in memory.right.items():
            state.tensors[self._right(name)] = whole_part(right)
        for kept in memory.kept.values():
            for name, first, values in kept.parts():
                size = kept.sizes[name]
                piece = Piece(Box((first,), (len(values),)), values)
                state.tensors[f"{PREFIX}{_KEPT}/{name}"] = Part((size,), values.dtype, (piece,))

    def load(
        self, saved: Saved, found: Mapping[str, Any], load: Load, buffers: Mapping[str, Tensor]
    ) -> None:
        """Take over the choice of how to sum, and the residuals once the model is spread."""
        self.notes = []
        if OUTER in saved.manifest.objects and not saved.read_object(OUTER)["is shared"]:
            self.notes.append(
                "the checkpoint is that of replicas that trained alone (local_steps): this run "
                "goes on from the model of their last meeting, and what they learned since is "
                "left out"
            )
        self.load_summing(saved, found, load)

    def load_summing(self, saved: Saved, found: Mapping[str, Any], load: Load) -> None:
        """How gradients are summed, without a word on local steps."""
        self._reduction.take(found.get("reduction"))
        about = found.get("compress")
        if self._replica.is_spread:
            self._load_residuals(saved, about, load)
        elif about is not None:  # it is not known yet which part of the model this rank has
            self._replica.after_spreading = lambda: self._load_residuals(saved, about, load)

    def _load_residuals(self, saved: Saved, about: Mapping[str, Any] | None, load: Load) -> None:
        averaging, layout = self._averaging, self._replica.layout
        there = {n: e for n, e in saved.manifest.tensors.items() if n.startswith(PREFIX)}
        if about is None or not there:
            return
        if averaging is None:
            self._warn()
            return
        exchange = averaging.exchange
        exchange.memory.residuals.clear()
        exchange.memory.kept.clear()
        if about["tp"] == layout.tp:
            exchange.memory.right = self._load_whole(there, self._right(""), load)
        kept = self._load_whole(there, f"{PREFIX}{_KEPT}/", load)
        if about["dp"] == layout.dp:
            own = self._replica.coordinate.dp
            exchange.memory.residuals = self._residuals_of(own, there, load)
            exchange.loaded_kept = kept
            return
        for old in range(about["dp"]):
            for name, residual in self._residuals_of(old, there, load).items():
                mean = exchange.memory.residuals.setdefault(name, torch.zeros_like(residual))
                mean.add_(residual, alpha=1 / about["dp"])
        for name, values in kept.items():
            if name in exchange.memory.residuals:
                residual = exchange.memory.residuals[name]
                residual.view(-1).add_(values.to(residual))
        if any(name.startswith(self._residual(0, "")) for name in there):
            self.notes.append(_told(about["dp"], layout.dp))

    def whole(self, merge: Merge) -> dict[str, Any]:
        """With the mean of the residuals of all ranks, for the whole model."""
        return {"compress": self._whole_residuals(merge), "reduction": self._reduction.state()}

    def _whole_residuals(self, merge: Merge) -> dict[str, Tensor] | None:
        if self._averaging is None:
            return None
        exchange = self._averaging.exchange
        group, size = exchange.wire.group, exchange.wire.size
        found: dict[str, Tensor] = {}
        for name, residual in exchange.memory.residuals.items():
            mean = residual.clone()
            for kept in exchange.memory.kept.values():
                for kept_name, first, values in kept.parts():
                    if kept_name == name:
                        mean.view(-1)[first : first + len(values)].add_(values, alpha=size)
            if size > 1:
                dist.all_reduce(mean, group=group)
                mean.div_(size)
            found[name] = self._like_parameter(mean, name)
        return merge(found)

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Take over what ``whole`` gave."""
        self._load_whole_residuals(state.get("compress"))
        self._reduction.take(state.get("reduction"))

    def _load_whole_residuals(self, residuals: Mapping[str, Tensor] | None) -> None:
        if not self._replica.is_spread and residuals:
            self._replica.after_spreading = lambda: self._load_whole_residuals(residuals)
            return
        if self._averaging is None:
            if residuals:
                self._warn()
            return
        memory = self._averaging.exchange.memory
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
        return self._replica.layout.tp > 1

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: own[0] for name, own in self._replica.spread.held.items()}

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

    def _residuals_of(
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
        device = self._replica.device
        return {name: tensor.to(device) for name, tensor in found.items()}

    def _residual(self, dp: int, name: str) -> str:
        return f"{PREFIX}{dp}/{name}"

    def _right(self, name: str) -> str:
        """Factors of tensor-parallel parts are those of one part each."""
        return f"{PREFIX}{_RIGHT}/{self._replica.coordinate.tp}/{name}"

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
