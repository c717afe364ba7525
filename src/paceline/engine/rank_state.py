"""An engine's state piece by piece, as each rank holds it: what checkpoints save and load.

Names are those of the whole model, so that what one layout saves another loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.rank_state import Part, RankState, empty_for, held_part
from paceline.checkpoint.saveable import Load, Saved
from paceline.engine.checks import another_model, check_optimizer_state
from paceline.engine.ema import AveragedWeights
from paceline.engine.loss_scale import AgreedScaler
from paceline.engine.optimizer_groups import Groups, install
from paceline.engine.randomness import restore_randomness, saved_randomness
from paceline.engine.whole_model import WholeModel
from paceline.options.ema import Weights
from paceline.parallel.dtensor import local
from paceline.parallel.meta import is_on_meta
from paceline.sync.protocol import Sync
from paceline.sync.replica import Replica

OBJECT = "engine"
MODEL, OPTIMIZER = "model/", "optimizer/"
AVERAGE = "ema/"
"""The averaged weights, where there are any, under the names of the model's."""


class _HasState(Protocol):
    """A schedule, or several."""

    def state_dict(self) -> Any:
        """What has to survive."""

    def load_state_dict(self, saved: Any) -> None:
        """Take over what ``state_dict`` gave."""


class SavedParts(Protocol):
    """What is saved of a model that is trained: an engine's ``StepContext``, or a loop's parts."""

    @property
    def replica(self) -> Replica:
        """The model on its layout."""

    @property
    def optimizer(self) -> Optimizer:
        """What updates it."""

    @property
    def groups(self) -> Groups:
        """The names of the parameters in the optimizer's groups."""

    @property
    def scaler(self) -> torch.amp.GradScaler | AgreedScaler | None:
        """That of fp16."""

    @property
    def learning_rate(self) -> _HasState:
        """The schedule."""

    @property
    def sync(self) -> Sync:
        """How replicas agree."""

    @property
    def average(self) -> AveragedWeights | None:
        """The moving average of the weights, where one is kept."""


class RankStates:
    """Collects and takes over the state of one engine, as far as this rank has it.

    ``whole`` is from before the model was spread.
    """

    def __init__(self, context: SavedParts, whole: WholeModel) -> None:
        self._context, self._replica, self._whole = context, context.replica, whole

    @property
    def whole(self) -> WholeModel:
        """The names and shapes of the whole model."""
        return self._whole

    # ------------------------------------------------------------------ saving

    def collect(self) -> RankState:
        """What this rank has of the state; shares its memory."""
        sync = self._context.sync.state
        state = RankState()
        for name, parameter in self._first_copies():
            state.tensors[MODEL + name] = held_part(sync.shared(name, parameter))
        if self._speaks_for_buffers:
            for name, buffer in self._own_buffers():
                state.tensors[MODEL + name] = held_part(sync.shared(name, buffer))
        self._collect_optimizer(state)
        self._collect_average(state)
        sync.collect(state, dict(self._own_buffers()))
        if self._replica.world.rank == 0:
            state.objects[OBJECT] = self._object()
        return state

    def _object(self) -> dict[str, Any]:
        context, scaler = self._context, self._context.scaler
        return {
            "step": self._replica.steps_done,
            "aliases": self._whole.aliases,
            **({"adapters": self._whole.adapters} if self._whole.adapters else {}),
            "groups": [
                {**{k: v for k, v in group.items() if k != "params"}, "params": names}
                for group, names in zip(
                    context.optimizer.param_groups, context.groups.names, strict=True
                )
            ],
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": context.learning_rate.state_dict(),
            "randomness": saved_randomness(self._replica),
            "extra": self._extra(),
            **context.sync.state.about(),
        }

    def _extra(self) -> dict[str, Any]:
        """What modules save beside tensors (``get_extra_state``)."""
        if not self._whole.has_extra:
            return {}
        saved = self._replica.model.state_dict(keep_vars=True)
        return {name: value for name, value in saved.items() if not isinstance(value, Tensor)}

    def _collect_optimizer(self, state: RankState) -> None:
        optimizer, sync = self._context.optimizer, self._context.sync.state
        prefix = sync.optimizer_prefix
        for name, parameter in self._first_copies():
            plain: dict[str, Any] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state.tensors[f"{prefix}{name}/{key}"] = held_part(value)
                else:
                    plain[key] = value
            if plain and (sync.keeps_optimizer or self._is_first_holder(parameter)):
                state.objects[prefix + name] = plain

    def _collect_average(self, state: RankState) -> None:
        if (average := self._context.average) is None:
            return
        average.check_not_in_place("checkpoint")
        for name, _ in self._first_copies():
            if (copies := average.of(name)) is not None:
                state.tensors[AVERAGE + name] = held_part(copies[0])

    def _first_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank but for copies of what an earlier stage saves."""
        replica = self._replica
        for name, copies in replica.held.items():
            if not replica.is_spread or not replica.spread.is_duplicate(copies[0]):
                yield name, copies[0]

    def _is_first_holder(self, parameter: nn.Parameter) -> bool:
        if self._replica.holds_whole_model:
            return self._replica.world.rank == 0
        return self._replica.spread.counts_in_norm(parameter)

    @property
    def _speaks_for_buffers(self) -> bool:
        """Buffers may differ between ranks that see different samples: the first one's count."""
        replica, place = self._replica, self._replica.coordinate
        is_first = place.dp == place.tp == place.cp == 0
        return is_first and (
            place.pp == 0 or (replica.is_spread and replica.spread.pipeline is not None)
        )

    def _own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._replica.model.named_buffers(remove_duplicate=False):
            if name in self._whole.buffers and not buffer.is_meta:
                yield name, buffer

    # ------------------------------------------------------------------ loading

    def take(
        self,
        saved: Saved,
        load: Load,
        *,
        weights_only: bool = False,
        strict: bool = True,
        weights: Weights = "model",
    ) -> None:
        """Take over what a checkpoint holds, at this or another layout. Every rank calls it.

        A checkpoint of weights alone, or ``weights_only``, leaves the optimizer and the step as
        they are, and casts the weights to the model's dtype where that is another. Not ``strict``,
        weights that one of the two lacks are left as they are. ``weights`` says whether the model
        gets the checkpoint's weights or their average. An engine that keeps an average goes on with
        the checkpoint's, or begins again where it has none.
        """
        found = saved.read_object(OBJECT) if OBJECT in saved.manifest.objects else {}
        names = self._names_in(saved.manifest, found.get("aliases", {}), strict)
        if weights_only:
            found = {}
        has_training = "step" in found
        if has_training:
            self._check_groups(found["groups"])
            self._replica.steps_done = found["step"]
            restore_randomness(self._replica, found.get("randomness"))
        if not self._replica.is_spread and is_on_meta(self._replica.model):
            # There is no memory to load into before the first batch has spread the model.
            self._replica.after_spreading = lambda: self._take(saved, found, names, load, weights)
        else:
            self._take(saved, found, names, load, weights)

    @property
    def is_pending(self) -> bool:
        """Whether what was taken over waits for the first batch, which spreads the model."""
        return self._replica.after_spreading is not None

    def _take(
        self,
        saved: Saved,
        found: Mapping[str, Any],
        names: Mapping[str, str],
        load: Load,
        weights: Weights,
    ) -> None:
        parts: dict[str, Part] = {}
        keys = {name: MODEL + source for name, source in names.items()}
        averages = {name: AVERAGE + source for name, source in names.items()}
        averages = {name: key for name, key in averages.items() if key in saved.manifest.tensors}
        if weights == "ema":
            keys |= averages
        casts = self._model_parts(parts, keys, saved.manifest, may_cast="step" not in found)
        average = self._average_parts(parts, averages, saved.manifest)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        if "step" in found:
            state = self._optimizer_parts(parts, saved)
        load(parts)
        with torch.no_grad():
            for target, value in casts:
                target.copy_(value)
        if self._context.average is not None:
            self._context.average.take(average)
            if not averages and "step" in found:
                self._context.average.begin_late(found["step"])
        if "step" in found:
            self._take_training(found, state)
            self._context.sync.state.load(saved, found, load, dict(self._own_buffers()))
        else:
            self._context.sync.model_replaced()

    def _names_in(
        self, manifest: Manifest, aliases: Mapping[str, str], strict: bool
    ) -> dict[str, str]:
        """Where each parameter and buffer of this model is found; tied weights have many names."""
        there = {n.removeprefix(MODEL): e for n, e in manifest.tensors.items() if _is_model(n)}
        others: dict[str, list[str]] = {}
        for name, first in self._whole.aliases.items():
            others.setdefault(first, []).append(name)
        found: dict[str, str] = {}
        problems, missing = [], []
        own = self._whole.parameters | self._whole.buffers
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
        used = {*found.values(), *own, *self._whole.aliases, *aliases}
        if strict and (unknown := sorted(there.keys() - used)):
            problems.append(f"this model has no {', '.join(unknown[:5])}")
        if problems:
            raise another_model("; ".join(problems) + ".")
        return found

    def _model_parts(
        self,
        parts: dict[str, Part],
        keys: Mapping[str, str],
        manifest: Manifest,
        *,
        may_cast: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        """Add where the model's tensors go; those that need a cast go elsewhere first.

        ``keys`` says under which key of the checkpoint each is.
        """
        casts: list[tuple[Tensor, Tensor]] = []
        held: dict[str, list[Tensor]] = {n: [*own] for n, own in self._replica.held.items()}
        held |= {name: [buffer] for name, buffer in self._own_buffers()}
        for name, copies in held.items():
            if name not in keys:  # left as it is
                continue
            entry = manifest.tensors[keys[name]]
            targets = [*copies]
            if entry.dtype != (here := dtype_name(copies[0].dtype)):
                if not may_cast:
                    raise another_model(f"{name} is {entry.dtype} there and {here} here.")
                targets = [empty_for(entry, like=copy) for copy in copies]
                casts += zip(map(local, copies), map(local, targets), strict=True)
            _add(parts, keys[name], targets)
        return casts

    def _average_parts(
        self, parts: dict[str, Part], keys: Mapping[str, str], manifest: Manifest
    ) -> dict[str, list[Tensor]]:
        """Add memory for the averaged weights, where an average is kept; returns it by name."""
        if self._context.average is None:
            return {}
        found = {}
        for name, copies in self._replica.held.items():
            if name in keys:
                entry = manifest.tensors[keys[name]]
                found[name] = [empty_for(entry, like=copy) for copy in copies]
                _add(parts, keys[name], found[name])
        return found

    def _optimizer_parts(
        self, parts: dict[str, Part], saved: Saved
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Add memory for the optimizer's state; returns it by parameter."""
        keys: dict[str, list[str]] = {}
        prefix = self._context.sync.state.optimizer_source(saved)
        for stored in saved.manifest.tensors:
            if stored.startswith(prefix):
                name, _, key = stored.removeprefix(prefix).rpartition("/")
                keys.setdefault(name, []).append(key)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for name, copies in self._replica.held.items():
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
        sizes = [len(names) for names in self._context.groups.names]
        check_optimizer_state({"param_groups": groups}, self._context.optimizer, sizes)

    def _take_training(
        self, found: Mapping[str, Any], state: Mapping[nn.Parameter, dict[str, Any]]
    ) -> None:
        context, scaler = self._context, self._context.scaler
        install(context.optimizer, found["groups"], state)
        if scaler is not None and found["scaler"] is not None:
            scaler.load_state_dict(found["scaler"])
        context.learning_rate.load_state_dict(found["schedule"])
        if found["extra"]:
            self._replica.model.load_state_dict(found["extra"], strict=False)
        self._replica.steps_done = found["step"]


def dtype_name(dtype: torch.dtype) -> str:
    """As the manifest writes it."""
    return str(dtype).removeprefix("torch.")


def _is_model(name: str) -> bool:
    return name.startswith(MODEL)


def _add(parts: dict[str, Part], name: str, targets: list[Tensor]) -> None:
    """Have ``name`` loaded into each of ``targets``, which share their shape."""
    for target in targets:
        part = held_part(target)
        if name in parts:
            part = Part(part.shape, part.dtype, (*parts[name].pieces, *part.pieces))
        parts[name] = part
