"""An engine's state piece by piece, as each rank holds it: what checkpoints save and load.

Names are those of the whole model, so that what one layout saves another loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.boxes import boxes_of
from paceline.checkpoint.manifest import Manifest, TensorEntry
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.engine.checks import another_model, check_optimizer_state, load_schedule
from paceline.engine.local_parts import LocalParts
from paceline.engine.repoint import install
from paceline.engine.wire_parts import WireParts
from paceline.parallel.whole import held_runs, local

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

OBJECT = "engine"
MODEL, OPTIMIZER = "model/", "optimizer/"


class Saved(Protocol):
    """A checkpoint, as far as an engine looks at it."""

    @property
    def manifest(self) -> Manifest:
        """What it holds."""

    def read_object(self, name: str) -> Any:
        """A plain value that it holds."""


Load = Callable[[dict[str, Part]], None]
"""Fills the memory of the parts it is given from a checkpoint. A collective."""


class Parts:
    """Collects and takes over the state of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.wire = WireParts(engine)
        self.local = LocalParts(engine)
        saved = engine.model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, parameter in engine.model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)
        self._shapes = {n: tuple(p.shape) for n, p in engine.model.named_parameters()}
        self._aliases = {
            name: first[id(parameter)]
            for name, parameter in engine.model.named_parameters(remove_duplicate=False)
            if name != first[id(parameter)]
        }
        self._buffers = {
            name: tuple(value.shape)
            for name, value in saved.items()
            if isinstance(value, Tensor) and id(value) not in first and name not in self._shapes
        }
        self._has_extra = any(not isinstance(value, Tensor) for value in saved.values())

    # ------------------------------------------------------------------ saving

    def collect(self) -> RankState:
        """What this rank has of the state; shares its memory."""
        engine = self._engine
        state = RankState()
        for name, parameter in self._first_copies():
            state.tensors[MODEL + name] = as_part(self.local.shared(name, parameter))
        if self._speaks_for_buffers:
            for name, buffer in self._own_buffers():
                state.tensors[MODEL + name] = as_part(self.local.shared(name, buffer))
        self._collect_optimizer(state)
        self.local.collect(state, dict(self._own_buffers()))
        self.wire.collect(state)
        if engine.world.rank == 0:
            state.objects[OBJECT] = self._object()
        return state

    def _object(self) -> dict[str, Any]:
        engine = self._engine
        schedule, scaler = engine.options["schedule"], engine._precision.scaler
        return {
            "step": engine.steps_done,
            "aliases": self._aliases,
            "groups": [
                {**{k: v for k, v in group.items() if k != "params"}, "params": names}
                for group, names in zip(
                    engine.optimizer.param_groups, engine._groups.names, strict=True
                )
            ],
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": schedule.state_dict() if isinstance(schedule, LRScheduler) else None,
            "extra": self._extra(),
            "compress": self.wire.about(),
            "reduction": engine.reducing.state(),
        }

    def _extra(self) -> dict[str, Any]:
        """What modules save beside tensors (``get_extra_state``)."""
        if not self._has_extra:
            return {}
        saved = self._engine.model.state_dict(keep_vars=True)
        return {name: value for name, value in saved.items() if not isinstance(value, Tensor)}

    def _collect_optimizer(self, state: RankState) -> None:
        optimizer, prefix = self._engine.optimizer, self.local.optimizer_prefix
        for name, parameter in self._first_copies():
            plain: dict[str, Any] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state.tensors[f"{prefix}{name}/{key}"] = as_part(value)
                else:
                    plain[key] = value
            if plain and (self.local.keeps_optimizer or self._is_first_holder(parameter)):
                state.objects[prefix + name] = plain

    def _first_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank but for copies of what an earlier stage saves."""
        spread = self._engine._spread
        for name, copies in self._engine._state.held.items():
            if spread is None or not spread.is_duplicate(copies[0]):
                yield name, copies[0]

    def _is_first_holder(self, parameter: nn.Parameter) -> bool:
        engine = self._engine
        if engine._spread is None or engine._spread.is_plain:
            return engine.world.rank == 0
        return engine._spread.counts_in_norm(parameter)

    @property
    def _speaks_for_buffers(self) -> bool:
        """Buffers may differ between ranks that see different samples: the first one's count."""
        place, spread = self._engine.place, self._engine._spread
        is_first = place.dp == place.tp == place.cp == 0
        return is_first and (place.pp == 0 or (spread is not None and spread.pipeline is not None))

    def _own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._engine.model.named_buffers(remove_duplicate=False):
            if name in self._buffers and not buffer.is_meta:
                yield name, buffer

    # ------------------------------------------------------------------ loading

    def take(
        self, saved: Saved, load: Load, *, weights_only: bool = False, strict: bool = True
    ) -> None:
        """Take over what a checkpoint holds, at this or another layout. Every rank calls it.

        A checkpoint of weights alone, or ``weights_only``, leaves the optimizer and the step as
        they are, and casts the weights to the model's dtype where that is another. Not ``strict``,
        weights that one of the two lacks are left as they are.
        """
        engine = self._engine
        found = saved.read_object(OBJECT) if OBJECT in saved.manifest.objects else {}
        names = self._names_in(saved.manifest, found.get("aliases", {}), strict)
        if weights_only:
            found = {}
        has_training = "step" in found
        if has_training:
            self._check_groups(found["groups"])
            engine.steps_done = found["step"]
        if engine._spread is None and engine._on_meta:
            # There is no memory to load into before the first batch has spread the model.
            engine.after_spreading = lambda: self._take(saved, found, names, load)
        else:
            self._take(saved, found, names, load)

    def _take(
        self, saved: Saved, found: Mapping[str, Any], names: Mapping[str, str], load: Load
    ) -> None:
        parts: dict[str, Part] = {}
        casts = self._model_parts(parts, names, saved.manifest, may_cast="step" not in found)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        if "step" in found:
            state = self._optimizer_parts(parts, saved)
        load(parts)
        with torch.no_grad():
            for target, value in casts:
                target.copy_(value)
        if "step" in found:
            self._take_training(found, state)
            self._take_wire(saved, found, load)
            self.local.take(saved, load, dict(self._own_buffers()))
        elif self._engine.rounds is not None:
            self._engine.rounds.forget()

    def _take_wire(self, saved: Saved, found: Mapping[str, Any], load: Load) -> None:
        engine, about = self._engine, found.get("compress")
        if engine._spread is not None:
            self.wire.take(saved, about, load)
        elif about is not None:  # it is not known yet which part of the model this rank has
            engine.after_spreading = lambda: self.wire.take(saved, about, load)

    def _names_in(
        self, manifest: Manifest, aliases: Mapping[str, str], strict: bool
    ) -> dict[str, str]:
        """Where each parameter and buffer of this model is found; tied weights have many names."""
        there = {n.removeprefix(MODEL): e for n, e in manifest.tensors.items() if _is_model(n)}
        others: dict[str, list[str]] = {}
        for name, first in self._aliases.items():
            others.setdefault(first, []).append(name)
        found: dict[str, str] = {}
        problems, missing = [], []
        own = self._shapes | self._buffers
        for name, shape in own.items():
            known = [name, *others.get(name, ())]
            candidates = [*known, *(aliases[n] for n in known if n in aliases)]
            source = next((c for c in candidates if c in there), None)
            if source is None:
                missing.append(name)
            elif there[source].shape != shape:
                problems.append(f"{name} has shape {there[source].shape} there and {shape} here")
            else:
                found[name] = source
        if missing and (strict or not found):
            problems.insert(0, f"it lacks {', '.join(missing[:5])}")
        used = {*found.values(), *own, *self._aliases, *aliases}
        if strict and (unknown := sorted(there.keys() - used)):
            problems.append(f"this model has no {', '.join(unknown[:5])}")
        if problems:
            raise another_model("; ".join(problems) + ".")
        return found

    def _model_parts(
        self,
        parts: dict[str, Part],
        names: Mapping[str, str],
        manifest: Manifest,
        *,
        may_cast: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        """Add where the model's tensors go; those that need a cast go elsewhere first."""
        casts: list[tuple[Tensor, Tensor]] = []
        held: dict[str, list[Tensor]] = {n: [*own] for n, own in self._engine._state.held.items()}
        held |= {name: [buffer] for name, buffer in self._own_buffers()}
        for name, copies in held.items():
            if name not in names:  # left as it is
                continue
            entry = manifest.tensors[MODEL + names[name]]
            targets = [*copies]
            if entry.dtype != (here := dtype_name(copies[0].dtype)):
                if not may_cast:
                    raise another_model(f"{name} is {entry.dtype} there and {here} here.")
                targets = [empty_for(entry, like=copy) for copy in copies]
                casts += zip(map(local, copies), map(local, targets), strict=True)
            _add(parts, MODEL + names[name], targets)
        return casts

    def _optimizer_parts(
        self, parts: dict[str, Part], saved: Saved
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Add memory for the optimizer's state; returns it by parameter."""
        keys: dict[str, list[str]] = {}
        prefix = self.local.source(saved)
        for stored in saved.manifest.tensors:
            if stored.startswith(prefix):
                name, _, key = stored.removeprefix(prefix).rpartition("/")
                keys.setdefault(name, []).append(key)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for name, copies in self._engine._state.held.items():
            for parameter in copies:
                own: dict[str, Any] = {}
                for key in keys.get(name, ()):
                    stored = f"{prefix}{name}/{key}"
                    entry = saved.manifest.tensors[stored]
                    own[key] = empty_for(entry, like=parameter)
                    _add(parts, stored, [own[key]])
                if prefix + name in saved.manifest.objects:
                    own |= saved.read_object(prefix + name)
                if own:
                    state[parameter] = own
        return state

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        engine = self._engine
        sizes = [len(names) for names in engine._groups.names]
        check_optimizer_state({"param_groups": groups}, engine.optimizer, sizes)

    def _take_training(
        self, found: Mapping[str, Any], state: Mapping[nn.Parameter, dict[str, Any]]
    ) -> None:
        engine = self._engine
        install(engine.optimizer, found["groups"], state)
        schedule, scaler = engine.options["schedule"], engine._precision.scaler
        if scaler is not None and found["scaler"] is not None:
            scaler.load_state_dict(found["scaler"])
        if isinstance(schedule, LRScheduler) and found["schedule"] is not None:
            load_schedule(schedule, found["schedule"])
        if found["extra"]:
            engine.model.load_state_dict(found["extra"], strict=False)
        engine.reducing.take(found.get("reduction"))
        engine.steps_done = found["step"]


def as_part(tensor: Tensor) -> Part:
    """What this rank holds of ``tensor``; shares its memory."""
    if not isinstance(tensor, DTensor):
        return whole_part(tensor)
    own = local(tensor).detach()
    pieces = tuple(
        Piece(box, own[inner.slices()] if own.ndim else own)
        for box, inner in boxes_of(held_runs(tensor))
    )
    return Part(tuple(tensor.shape), tensor.dtype, pieces)


def dtype_name(dtype: torch.dtype) -> str:
    """As the manifest writes it."""
    return str(dtype).removeprefix("torch.")


def _is_model(name: str) -> bool:
    return name.startswith(MODEL)


def empty_for(entry: TensorEntry, like: Tensor | None) -> Tensor:
    """Memory for a saved tensor: cut as ``like`` is where it has its shape, else whole."""
    dtype = getattr(torch, entry.dtype)
    if like is not None and entry.shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype)


def _add(parts: dict[str, Part], name: str, targets: list[Tensor]) -> None:
    """Have ``name`` loaded into each of ``targets``, which share their shape."""
    for target in targets:
        part = as_part(target)
        if name in parts:
            part = Part(part.shape, part.dtype, (*parts[name].pieces, *part.pieces))
        parts[name] = part
