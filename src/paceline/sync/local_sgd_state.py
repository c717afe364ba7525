"""Replicas of local SGD, as part of a checkpoint.

What the checkpoint says of the model is the one that all replicas share. Beside it each of them
has its own parameters, buffers, optimizer state and residuals under ``local/<its number>/``; what
is equal on all of them, the outer optimizer's, is under ``outer/``. As many replicas go on to the
bit, in the middle of a round, too. For any other number of them the saved ones meet first, so that
nothing that they learned since their last meeting is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.saveable import Load, Saved
from paceline.sync.outer_loop import OuterLoop
from paceline.sync.outer_step import OuterStep, difference
from paceline.sync.protocol import Merge
from paceline.sync.replica import Replica
from paceline.sync.synchronous_state import OPTIMIZER, OUTER, SynchronousState


def replica_name(number: int) -> str:
    """Where a replica's own state is."""
    return f"local/{number}"


class Scaler(Protocol):
    """The gradient scaler of fp16, of which each replica has its own."""

    def state_dict(self) -> dict[str, Any]:
        """Its scale, and what it goes on from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""


class LocalSgdState:
    """See ``SyncState``; ``plain`` is that of synchronous steps."""

    def __init__(
        self, loop: OuterLoop, replica: Replica, plain: SynchronousState, scaler: Scaler | None
    ) -> None:
        self._loop, self._replica, self._plain, self._scaler = loop, replica, plain, scaler
        self.notes: list[str] = []
        """What there is to tell the user of the checkpoint that was loaded."""

    # ------------------------------------------------------------------ saving

    @property
    def _begun(self) -> OuterLoop | None:
        """The outer loop, once replicas differ from each other."""
        return self._loop if self._loop.begun else None

    def shared(self, name: str, own: Tensor) -> Tensor:
        """What stands for a parameter or a buffer in the model that all replicas share."""
        if (loop := self._begun) is None:
            return own
        return loop.outer.shared.get(name, loop.buffers.get(name, own))

    @property
    def keeps_optimizer(self) -> bool:
        """Whether this rank has an optimizer state that no other rank has."""
        return self._begun is not None

    @property
    def optimizer_prefix(self) -> str:
        """Where this replica's optimizer state goes: that of the first is where any layout's is."""
        number = 0 if self._begun is None else self._replica.coordinate.dp
        return f"{replica_name(number)}/{OPTIMIZER}" if number else OPTIMIZER

    def collect(self, state: RankState, buffers: Mapping[str, Tensor]) -> None:
        """Add what this replica has, and what all have alike; ``buffers`` are its persistent ones.

        Waits for outer steps under way: what they came to is saved, and taken over when due.
        """
        if self._begun is not None:
            self._collect(self._begun, state, buffers)
        self._plain.collect(state, buffers)

    def _collect(self, loop: OuterLoop, state: RankState, buffers: Mapping[str, Tensor]) -> None:
        tensors = state.tensors
        loop.finish_pending()
        me = replica_name(self._replica.coordinate.dp)
        if not loop.is_shared:
            for name in loop.outer.shared:
                tensors[f"{me}/model/{name}"] = whole_part(loop.held(name))
        for name, buffer in buffers.items():
            tensors[f"{me}/buffer/{name}"] = whole_part(buffer)
        for name, momentum in loop.outer.momentum.items():
            tensors[f"{OUTER}/momentum/{name}"] = whole_part(momentum)
        for number, outer_step in enumerate(loop.pending):
            for name, mean in outer_step.means().items():
                tensors[f"{OUTER}/pending/{number}/{name}"] = whole_part(mean)
            for name, then in (outer_step.snapshot or {}).items():
                tensors[f"{me}/pending/{number}/{name}"] = whole_part(then)
        self._collect_exchange(loop, state, me)
        scaler = self._scaler
        state.objects[me] = {
            "counted": [float(items) for items in loop.counted],
            "scaler": None if scaler is None else scaler.state_dict(),
            "goes on": [outer_step.snapshot is not None for outer_step in loop.pending],
        }
        if self._replica.world.rank == 0:
            state.objects[OUTER] = self._about(loop)

    def _about(self, loop: OuterLoop) -> dict[str, Any]:
        return {
            "replicas": self._replica.layout.dp,
            "fragments": loop.fragments,
            "met_at": list(loop.stepped_at),
            "meetings": loop.outer_steps,
            "is shared": loop.is_shared,
            "buffers": list(loop.buffers),
            "pending": [
                {
                    "fragment": outer_step.fragment,
                    "due": outer_step.due,
                    "names": list(outer_step.names),
                    "buffers": list(outer_step.buffers),
                    "total": float(outer_step.wait()),
                }
                for outer_step in loop.pending
            ],
        }

    def _collect_exchange(self, loop: OuterLoop, state: RankState, me: str) -> None:
        for exchange in loop.exchanges:
            memory = exchange.memory
            for name, residual in memory.residuals.items():
                state.tensors[f"{me}/residual/{name}"] = whole_part(residual)
            for name, right in memory.right.items():
                state.tensors[f"{OUTER}/right/{name}"] = whole_part(right)
            for kept in memory.kept.values():
                for name, first, values in kept.parts():
                    shape = (kept.sizes[name],)
                    piece = Piece(Box((first,), (len(values),)), values)
                    state.tensors[f"{OUTER}/kept/{name}"] = Part(shape, values.dtype, (piece,))

    # ------------------------------------------------------------------ loading

    def optimizer_source(self, saved: Saved) -> str:
        """Under which name this replica finds an optimizer state in a checkpoint."""
        if OUTER not in saved.manifest.objects:
            return OPTIMIZER
        number = self._replica.coordinate.dp % saved.read_object(OUTER)["replicas"]
        return f"{replica_name(number)}/{OPTIMIZER}" if number else OPTIMIZER

    def about(self) -> dict[str, Any]:
        """That of synchronous steps; the rest is an object of its own."""
        return self._plain.about()

    def load(
        self, saved: Saved, found: Mapping[str, Any], load: Load, buffers: Mapping[str, Tensor]
    ) -> None:
        """Go on in the middle of a round, or, with other replicas, from an outer step before."""
        loop, replica = self._loop, self._replica
        self.notes = []
        self._plain.notes = []
        self._plain.load_summing(saved, found, load)
        about = saved.read_object(OUTER) if OUTER in saved.manifest.objects else None
        loop.forget()
        if about is None or not loop.options.is_alone(replica.steps_done):
            return
        loop.adopt()
        take = _Taking(loop, saved, load)
        loop.outer_steps = about["meetings"]
        loop.outer.momentum = take.all_under(f"{OUTER}/momentum")
        own = saved.read_object(replica_name(replica.coordinate.dp % about["replicas"]))
        if self._scaler is not None and own["scaler"] is not None:
            self._scaler.load_state_dict(own["scaler"])
        if about["replicas"] == replica.layout.dp and about["fragments"] == loop.fragments:
            self._go_on(take, about, own, buffers)
            return
        _step_before(take, about)
        self.notes.append(_told(about, replica.layout.dp, replica.steps_done))

    def whole(self, merge: Merge) -> dict[str, Any]:
        """The shared model stands for all replicas."""
        return self._plain.whole(merge)

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Every replica begins anew from the shared model."""
        self._plain.load_whole(state)

    def _go_on(
        self,
        take: _Taking,
        about: Mapping[str, Any],
        own: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Go on in the middle of a round."""
        loop, me = take.loop, replica_name(self._replica.coordinate.dp)
        if not about["is shared"]:
            take.into({f"{me}/model/{n}": loop.held(n).detach() for n in loop.outer.shared})
        take.into({f"{me}/buffer/{name}": buffer for name, buffer in buffers.items()})
        loop.stepped_at = list(about["met_at"])
        for items, counted in zip(loop.counted, own["counted"], strict=True):
            items.fill_(counted)
        for number, entry in enumerate(about["pending"]):
            then = take.all_under(f"{me}/pending/{number}") if own["goes on"][number] else None
            loop.pending.append(take.pending(number, entry, then))
        residuals = take.all_under(f"{me}/residual")
        right, kept = take.all_under(f"{OUTER}/right"), take.all_under(f"{OUTER}/kept")
        for names, exchange in zip(loop.fragments, loop.exchanges, strict=True):
            exchange.memory.residuals = {n: residuals[n] for n in names if n in residuals}
            exchange.memory.right = {n: right[n] for n in names if n in right}
            exchange.loaded_kept = {n: kept[n] for n in names if n in kept}


class _Taking:
    """Loads tensors by name for one replica."""

    def __init__(self, loop: OuterLoop, saved: Saved, load: Load) -> None:
        self.loop, self.saved = loop, saved
        self._load = load
        self._device = next(iter(loop.counted)).device

    def into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets``. A collective."""
        self._load({name: whole_part(tensor) for name, tensor in targets.items()})

    def all_under(self, prefix: str) -> dict[str, Tensor]:
        """Whatever is saved under ``prefix``, by the rest of its name. A collective."""
        found = {
            name.removeprefix(f"{prefix}/"): torch.empty(
                entry.shape, dtype=getattr(torch, entry.dtype), device=self._device
            )
            for name, entry in self.saved.manifest.tensors.items()
            if name.startswith(f"{prefix}/")
        }
        self.into({f"{prefix}/{name}": tensor for name, tensor in found.items()})
        return found

    def pending(
        self, number: int, entry: Mapping[str, Any], then: dict[str, Tensor] | None
    ) -> OuterStep:
        """An outer step that was exchanged, but not taken over. A collective."""
        means = self.all_under(f"{OUTER}/pending/{number}")
        total = torch.tensor(entry["total"], dtype=torch.float64, device=self._device)
        return OuterStep(
            fragment=entry["fragment"],
            due=entry["due"],
            names=entry["names"],
            gradients=[means[name] for name in entry["names"]],
            buffers={name: means[name] for name in entry["buffers"]},
            weight=torch.zeros_like(total),
            snapshot=then,
            total=total,
        )


@torch.no_grad()
def _step_before(take: _Taking, about: Mapping[str, Any]) -> None:
    """Take the saved replicas' outer step as of when they were saved, and go on from its model.

    Every rank computes it alike. Replicas are loaded one after the other: there may be many.
    """
    loop = take.loop
    before = dict(loop.outer.shared) | loop.buffers
    before = {name: tensor.clone() for name, tensor in before.items()}
    for number, entry in enumerate(about["pending"]):
        loop.move_shared(take.pending(number, entry, None))
    fragments = [list(names) for names in about["fragments"]]
    fragments[-1] += [name for name in about["buffers"] if name in loop.buffers]
    sums: dict[str, Tensor] = {}
    totals = [0.0] * len(fragments)
    for number in range(about["replicas"]):
        own, base = _replica(take, about, number, before)
        counted = take.saved.read_object(replica_name(number))["counted"]
        for fragment, names in enumerate(fragments):
            far = {name: difference(base[name], own[name]) for name in names if name in own}
            if counted[fragment] > 0 and all(bool(d.isfinite().all()) for d in far.values()):
                totals[fragment] += counted[fragment]
                for name, distance in far.items():
                    into = sums.setdefault(name, torch.zeros_like(distance))
                    into.add_(distance, alpha=counted[fragment])
    for fragment, names in enumerate(fragments):
        moved = [name for name in names if name in sums]
        means = {name: sums[name] / totals[fragment] for name in moved}
        parameters = [name for name in moved if name in loop.outer.shared]
        loop.outer.step(parameters, [means[name] for name in parameters])
        for name in moved:
            if name in loop.buffers:
                loop.buffers[name] -= means[name]
    loop.take_shared()
    _take_residuals(take, about["replicas"])


def _replica(
    take: _Taking, about: Mapping[str, Any], number: int, before: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A saved replica's parameters and buffers, and from where it came since it last met."""
    me = replica_name(number)
    own = take.all_under(f"{me}/model")
    own |= {n: b for n, b in take.all_under(f"{me}/buffer").items() if n in take.loop.buffers}
    base = dict(before)
    goes_on = take.saved.read_object(me)["goes on"]
    for place in range(len(about["pending"])):
        then = take.all_under(f"{me}/pending/{place}")
        if goes_on[place]:
            base |= then
    return own, base


def _take_residuals(take: _Taking, replicas: int) -> None:
    """Every replica takes the mean of what the saved ones had not sent: as much as they had."""
    means: dict[str, Tensor] = {}
    for number in range(replicas):
        for name, residual in take.all_under(f"{replica_name(number)}/residual").items():
            mean = means.setdefault(name, torch.zeros_like(residual))
            mean.add_(residual, alpha=1 / replicas)
    for name, values in take.all_under(f"{OUTER}/kept").items():
        if name in means:
            means[name].view(-1).add_(values.to(means[name]))
    right = take.all_under(f"{OUTER}/right")
    for names, exchange in zip(take.loop.fragments, take.loop.exchanges, strict=True):
        exchange.memory.residuals = {name: means[name] for name in names if name in means}
        exchange.memory.right = {name: right[name] for name in names if name in right}


def _told(about: Mapping[str, Any], now: int, step: int) -> str:
    old = about["replicas"]
    changed = f"{old} replica{'s' * (old != 1)} before, {now} now"
    if old == now:
        changed = f"{len(about['fragments'])} fragments before, another number now"
    return (
        f"local steps: {changed}: what was learned since the last meeting went into the shared "
        f"model as of step {step}, from which every replica goes on, with the optimizer state of "
        "one of those before"
    )
