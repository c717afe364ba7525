"""Replicas that train alone, as part of a checkpoint.

What the checkpoint says of the model is the one that all replicas share. Beside it each of them
has its own parameters, buffers, optimizer state and residuals under ``local/<its number>/``; what
is equal on all of them, the outer optimizer's, is under ``outer/``. As many replicas go on to the
bit, in the middle of a round, too. For any other number of them the saved ones meet first, so that
nothing that they learned since their last meeting is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.engine.local import Meeting, Rounds, difference

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.parts import Load, Saved

OUTER = "outer"
_OPTIMIZER = "optimizer/"


def replica(number: int) -> str:
    """Where a replica's own state is."""
    return f"local/{number}"


class LocalParts:
    """Collects and takes over for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.notes: list[str] = []
        """What there is to tell the user of the checkpoint that was loaded."""

    # ------------------------------------------------------------------ saving

    @property
    def _begun(self) -> Rounds | None:
        """The rounds, once replicas differ from each other."""
        rounds = self._engine.rounds
        return rounds if rounds is not None and rounds.begun else None

    def shared(self, name: str, own: Tensor) -> Tensor:
        """What stands for a parameter or a buffer in the model that all replicas share."""
        if (rounds := self._begun) is None:
            return own
        return rounds.outer.shared.get(name, rounds.buffers.get(name, own))

    @property
    def keeps_optimizer(self) -> bool:
        """Whether this rank has an optimizer state that no other rank has."""
        return self._begun is not None

    @property
    def optimizer_prefix(self) -> str:
        """Where this replica's optimizer state goes: that of the first is where any layout's is."""
        number = 0 if self._begun is None else self._engine.place.dp
        return f"{replica(number)}/{_OPTIMIZER}" if number else _OPTIMIZER

    def collect(self, state: RankState, buffers: Mapping[str, Tensor]) -> None:
        """Add what this replica has, and what all have alike; ``buffers`` are its persistent ones.

        Waits for meetings that are under way: what they came to is saved, and taken over when due.
        """
        if (rounds := self._begun) is None:
            return
        engine, tensors = self._engine, state.tensors
        rounds.finish_meetings()
        me = replica(engine.place.dp)
        if not rounds.is_shared:
            for name in rounds.outer.shared:
                tensors[f"{me}/model/{name}"] = whole_part(rounds.held(name))
        for name, buffer in buffers.items():
            tensors[f"{me}/buffer/{name}"] = whole_part(buffer)
        for name, momentum in rounds.outer.momentum.items():
            tensors[f"{OUTER}/momentum/{name}"] = whole_part(momentum)
        for number, meeting in enumerate(rounds.pending):
            for name, mean in meeting.means().items():
                tensors[f"{OUTER}/pending/{number}/{name}"] = whole_part(mean)
            for name, then in (meeting.then or {}).items():
                tensors[f"{me}/pending/{number}/{name}"] = whole_part(then)
        self._collect_exchange(rounds, state, me)
        scaler = engine._precision.scaler
        state.objects[me] = {
            "counted": [float(items) for items in rounds.counted],
            "scaler": None if scaler is None else scaler.state_dict(),
            "goes on": [meeting.then is not None for meeting in rounds.pending],
        }
        if engine.world.rank == 0:
            state.objects[OUTER] = self._about(rounds)

    def _about(self, rounds: Rounds) -> dict[str, Any]:
        return {
            "replicas": self._engine.layout.dp,
            "fragments": rounds.fragments,
            "met_at": list(rounds.met_at),
            "meetings": rounds.meetings,
            "is shared": rounds.is_shared,
            "buffers": list(rounds.buffers),
            "pending": [
                {
                    "fragment": meeting.fragment,
                    "due": meeting.due,
                    "names": list(meeting.names),
                    "buffers": list(meeting.buffers),
                    "total": float(meeting.wait()),
                }
                for meeting in rounds.pending
            ],
        }

    def _collect_exchange(self, rounds: Rounds, state: RankState, me: str) -> None:
        for exchange in rounds.exchanges:
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

    def source(self, saved: Saved) -> str:
        """Under which name this replica finds an optimizer state in a checkpoint."""
        if self._engine.rounds is None or OUTER not in saved.manifest.objects:
            return _OPTIMIZER
        number = self._engine.place.dp % saved.read_object(OUTER)["replicas"]
        return f"{replica(number)}/{_OPTIMIZER}" if number else _OPTIMIZER

    def take(self, saved: Saved, load: Load, buffers: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint holds beside the model, which has been loaded. Every rank."""
        engine, rounds = self._engine, self._engine.rounds
        self.notes = []
        about = saved.read_object(OUTER) if OUTER in saved.manifest.objects else None
        if rounds is None:
            if about is not None and not about["is shared"]:
                self.notes.append(
                    "the checkpoint is that of replicas that trained alone (local_steps): this run "
                    "goes on from the model of their last meeting, and what they learned since is "
                    "left out"
                )
            return
        rounds.forget()
        if about is None or not rounds.options.is_alone(engine.steps_done):
            return
        rounds.adopt()
        take = _Taking(rounds, saved, load)
        rounds.meetings = about["meetings"]
        rounds.outer.momentum = take.all_under(f"{OUTER}/momentum")
        own = saved.read_object(replica(engine.place.dp % about["replicas"]))
        if engine._precision.scaler is not None and own["scaler"] is not None:
            engine._precision.scaler.load_state_dict(own["scaler"])
        if about["replicas"] == engine.layout.dp and about["fragments"] == rounds.fragments:
            self._go_on(take, about, own, buffers)
            return
        _meet_before(take, about)
        self.notes.append(_told(about, engine.layout.dp, engine.steps_done))

    def _go_on(
        self,
        take: _Taking,
        about: Mapping[str, Any],
        own: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Go on in the middle of a round."""
        rounds, me = take.rounds, replica(self._engine.place.dp)
        if not about["is shared"]:
            take.into({f"{me}/model/{n}": rounds.held(n).detach() for n in rounds.outer.shared})
        take.into({f"{me}/buffer/{name}": buffer for name, buffer in buffers.items()})
        rounds.met_at = list(about["met_at"])
        for items, counted in zip(rounds.counted, own["counted"], strict=True):
            items.fill_(counted)
        for number, entry in enumerate(about["pending"]):
            then = take.all_under(f"{me}/pending/{number}") if own["goes on"][number] else None
            rounds.pending.append(take.pending(number, entry, then))
        residuals = take.all_under(f"{me}/residual")
        right, kept = take.all_under(f"{OUTER}/right"), take.all_under(f"{OUTER}/kept")
        for names, exchange in zip(rounds.fragments, rounds.exchanges, strict=True):
            exchange.memory.residuals = {n: residuals[n] for n in names if n in residuals}
            exchange.memory.right = {n: right[n] for n in names if n in right}
            exchange.loaded_kept = {n: kept[n] for n in names if n in kept}


class _Taking:
    """Loads tensors by name for one replica."""

    def __init__(self, rounds: Rounds, saved: Saved, load: Load) -> None:
        self.rounds, self.saved = rounds, saved
        self._load = load
        self._device = next(iter(rounds.counted)).device

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
    ) -> Meeting:
        """A meeting that has taken place, but was not taken over. A collective."""
        means = self.all_under(f"{OUTER}/pending/{number}")
        total = torch.tensor(entry["total"], dtype=torch.float64, device=self._device)
        return Meeting(
            fragment=entry["fragment"],
            due=entry["due"],
            names=entry["names"],
            distances=[means[name] for name in entry["names"]],
            buffers={name: means[name] for name in entry["buffers"]},
            weight=torch.zeros_like(total),
            then=then,
            total=total,
        )


@torch.no_grad()
def _meet_before(take: _Taking, about: Mapping[str, Any]) -> None:
    """Have the saved replicas meet as of when they were saved, and go on from the model shared.

    Every rank computes it alike. Replicas are loaded one after the other: there may be many.
    """
    rounds = take.rounds
    before = dict(rounds.outer.shared) | rounds.buffers
    before = {name: tensor.clone() for name, tensor in before.items()}
    for number, entry in enumerate(about["pending"]):
        rounds.move_shared(take.pending(number, entry, None))
    fragments = [list(names) for names in about["fragments"]]
    fragments[-1] += [name for name in about["buffers"] if name in rounds.buffers]
    sums: dict[str, Tensor] = {}
    totals = [0.0] * len(fragments)
    for number in range(about["replicas"]):
        own, base = _replica(take, about, number, before)
        counted = take.saved.read_object(replica(number))["counted"]
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
        parameters = [name for name in moved if name in rounds.outer.shared]
        rounds.outer.step(parameters, [means[name] for name in parameters])
        for name in moved:
            if name in rounds.buffers:
                rounds.buffers[name] -= means[name]
    rounds.take_shared()
    _take_residuals(take, about["replicas"])


def _replica(
    take: _Taking, about: Mapping[str, Any], number: int, before: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A saved replica's parameters and buffers, and from where it came since it last met."""
    me = replica(number)
    own = take.all_under(f"{me}/model")
    own |= {n: b for n, b in take.all_under(f"{me}/buffer").items() if n in take.rounds.buffers}
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
        for name, residual in take.all_under(f"{replica(number)}/residual").items():
            mean = means.setdefault(name, torch.zeros_like(residual))
            mean.add_(residual, alpha=1 / replicas)
    for name, values in take.all_under(f"{OUTER}/kept").items():
        if name in means:
            means[name].view(-1).add_(values.to(means[name]))
    right = take.all_under(f"{OUTER}/right")
    for names, exchange in zip(take.rounds.fragments, take.rounds.exchanges, strict=True):
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
