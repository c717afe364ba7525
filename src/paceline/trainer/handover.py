"""What ``fit(nproc=N)`` brings back from its ranks, so that the caller's objects end up as theirs.

Ranks that leave in good order (done, stopped, interrupted) put the whole state together, and rank 0
leaves it in a file. Ranks that fail cannot talk to each other any more: each leaves the boxes of
tensors that it holds, and the caller puts them together.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.checkpoint.boxes import Box
from paceline.data import Loader
from paceline.engine.freezing import Freezing
from paceline.engine.internals import internals_of
from paceline.engine.learning_rate import load_schedule, torch_scheduler
from paceline.engine.rank_state import AVERAGE, MODEL, OBJECT, OPTIMIZER
from paceline.nested import map_tensors
from paceline.parallel.meta import materialise
from paceline.trainer.base import TrainerBase

_WHOLE = "whole.pkl"


@dataclass
class Left:
    """What the ranks leave behind.

    ``engine`` is an engine's ``state_dict()``. ``callbacks`` holds each one's attributes, pickled
    one by one, and its ``state_dict()``; ``objects`` the ``state_dict()`` of each.
    """

    engine: dict[str, Any]
    epoch: int
    callbacks: list[tuple[dict[str, bytes], dict[str, Any]]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] | None = None
    not_brought: list[str] = field(default_factory=list)
    """What of the callbacks could not be pickled."""


@dataclass
class _Share:
    """What one rank leaves that has failed: of each tensor its shape, dtype and boxes."""

    step: int
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, list[tuple[Box, Tensor]]]]
    objects: dict[str, Any]
    left: Left | None


# ---------------------------------------------------------------------- on the ranks


def leave_whole(folder: Path, trainer: TrainerBase, train: Any) -> None:
    """All ranks are through, at the same step: rank 0 leaves all there is. A collective."""
    state = trainer.engine.state_dict()  # the whole model's, whatever the layout
    objects = {name: _whole(saved.state_dict()) for name, saved in trainer.objects.items()}
    if trainer.engine.world.is_main:
        left = _beside(trainer, train)
        left.engine, left.objects = _whole(state), objects
        _write(folder / _WHOLE, left)


def leave_share(folder: Path, trainer: TrainerBase, train: Any) -> None:
    """This rank fails: leave what it holds, if it has come as far as to hold anything."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told to end, because another has failed
    with contextlib.suppress(Exception):  # the failure itself is what there is to tell
        engine, rank = trainer.engine, trainer.engine.world.rank
        if not engine.layout.beyond_dp and rank > 1:
            return  # all of them hold the same, and two are enough
        state = internals_of(engine).rank_state.collect()
        tensors = {
            name: (part.shape, part.dtype, [(p.box, _plain(p.tensor)) for p in part.pieces])
            for name, part in state.tensors.items()
        }
        objects = {n: v for n, v in state.objects.items() if n.startswith((OBJECT, OPTIMIZER))}
        left = _beside(trainer, train) if rank == 0 else None
        _write(folder / f"share-{rank}.pkl", _Share(engine.steps_done, tensors, objects, left))


def _beside(trainer: TrainerBase, train: Any) -> Left:
    left = Left({}, trainer.epoch, loader=train.state_dict() if isinstance(train, Loader) else None)
    known = {id(found): path for path, found in _shared(trainer)}
    for callback in trainer.callbacks:
        attributes = {}
        for name, value in getattr(callback, "__dict__", {}).items():
            try:
                attributes[name] = _dumps(value, known)
            except Exception as error:
                told = f"{type(callback).__name__}.{name} ({type(error).__name__}: {error})"
                left.not_brought.append(told)
        left.callbacks.append((attributes, _without_shards(callback.state_dict())))
    left.objects = {
        name: _without_shards(saved.state_dict()) for name, saved in trainer.objects.items()
    }
    return left


def _whole(tree: Any) -> Any:
    """``tree`` with every tensor whole, on the CPU. A collective where there are DTensors."""
    return map_tensors(tree, lambda t: _plain(t.full_tensor() if isinstance(t, DTensor) else t))


def _without_shards(tree: Any) -> Any:
    """``tree`` on the CPU; of a rank's part of a tensor nothing can be made here."""
    return map_tensors(tree, lambda tensor: None if isinstance(tensor, DTensor) else _plain(tensor))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _write(path: Path, value: Any) -> None:
    import cloudpickle

    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(cloudpickle.dumps(value))
    part.rename(path)


# ---------------------------------------------------------------------- at the caller


def find(folder: Path) -> Left | None:
    """What the ranks left, whole; ``None`` where they left nothing, or not all of it."""
    if (folder / _WHOLE).exists():
        whole: Left = pickle.loads((folder / _WHOLE).read_bytes())
        return whole
    shares = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("share-*.pkl"))]
    return _put_together(shares)


def take(trainer: TrainerBase, left: Left, train: Any) -> None:
    """Make the caller's model, optimizer, schedule, callbacks and objects what the ranks' are."""
    state = left.engine
    _take_model(trainer, state.pop("model"))
    freezing = Freezing(trainer.model, trainer.engine_options)
    freezing.begin()
    optimizer = trainer.optimizer
    assert optimizer is not None  # nothing is trained without one
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(freezing.parameters())
        trainer.optimizer = optimizer
    optimizer.load_state_dict(state["optimizer"])
    schedule = torch_scheduler(trainer.engine_options.schedule)
    if schedule is not None and state["schedule"] is not None:
        load_schedule(schedule, state["schedule"])
    named = {name: [parameter] for name, parameter in trainer.model.named_parameters()}
    freezing.follow(named, state["step"])
    trainer.take_over(state, left.epoch)
    if isinstance(train, Loader) and left.loader is not None:
        train.load_state_dict(left.loader)
    for name, saved in left.objects.items():
        trainer.objects[name].load_state_dict(saved)
    _take_callbacks(trainer, left)


@torch.no_grad()
def _take_model(trainer: TrainerBase, saved: Mapping[str, Any]) -> None:
    model = trainer.model.train()
    if any(parameter.is_meta for parameter in model.parameters()):
        init = trainer.engine_options.init or getattr(model, "_init_weights", None)
        materialise(model, seed=trainer.seed, device=torch.device("cpu"), init=init)
    own = model.state_dict(keep_vars=True)
    for name, value in saved.items():
        here = own.get(name)
        if isinstance(value, Tensor) and isinstance(here, Tensor) and here.dtype != value.dtype:
            here.data = value.to(here.device)  # as a precision of fp64 does on the ranks
    model.load_state_dict(saved)


def _take_callbacks(trainer: TrainerBase, left: Left) -> None:
    known = dict(_shared(trainer))
    for callback, (attributes, state) in zip(trainer.callbacks, left.callbacks, strict=True):
        for name, data in attributes.items():
            _renew(callback, name, _loads(data, known, trainer))
        if state:
            callback.load_state_dict(state)
    if left.not_brought:
        warnings.warn(
            f"not brought back from the ranks: {'; '.join(left.not_brought)}. The caller's are as "
            "they were.",
            stacklevel=5,
        )


def _renew(owner: object, name: str, value: Any) -> None:
    """Give an attribute its new value; in place, where others may hold what it is."""
    own = vars(owner).get(name)
    same_kind = type(own) is type(value)
    if same_kind and isinstance(own, list | deque | dict | set):
        own.clear()
        if isinstance(own, list | deque):
            own.extend(value)
        else:
            own.update(value)
    else:
        vars(owner)[name] = value


def _put_together(shares: Sequence[_Share]) -> Left | None:
    """The whole state from what the ranks of a failed world hold, if that is all of it."""
    objects = {name: value for share in shares for name, value in share.objects.items()}
    left = next((share.left for share in shares if share.left is not None), None)
    if left is None or OBJECT not in objects or len({share.step for share in shares}) > 1:
        return None
    about = objects[OBJECT]
    tensors: dict[str, Tensor] = {}
    for name in {name for share in shares for name in share.tensors}:
        if name.startswith((MODEL, OPTIMIZER, AVERAGE)):
            whole = _from_boxes([share.tensors[name] for share in shares if name in share.tensors])
            if whole is None:
                return None
            tensors[name] = whole
    model = {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}
    model |= {alias: model[first] for alias, first in about["aliases"].items() if first in model}
    left.engine = {
        "step": about["step"],
        "model": {**model, **about["extra"]},
        "optimizer": _optimizer_state(about["groups"], tensors, objects),
        "scaler": about["scaler"],
        "schedule": about["schedule"],
        "ema": {n.removeprefix(AVERAGE): t for n, t in tensors.items() if n.startswith(AVERAGE)},
    }
    return left


def _from_boxes(
    parts: Sequence[tuple[tuple[int, ...], torch.dtype, list[tuple[Box, Tensor]]]],
) -> Tensor | None:
    shape, dtype, _ = parts[0]
    whole = torch.empty(shape, dtype=dtype)
    missing = whole.numel()
    seen = set()
    for _, _, pieces in parts:
        for box, tensor in pieces:
            if box not in seen:
                seen.add(box)
                missing -= tensor.numel()
                if shape:
                    whole[box.slices()] = tensor
                else:
                    whole.copy_(tensor)
    return whole if missing <= 0 else None


def _optimizer_state(
    groups: Sequence[dict[str, Any]], tensors: Mapping[str, Tensor], objects: Mapping[str, Any]
) -> Any:
    """In the form of torch's ``state_dict``: parameters by number, in the order of the groups."""
    names = [name for group in groups for name in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(names):
        prefix = f"{OPTIMIZER}{name}/"
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        own = {key: value for key, value in own.items() if "/" not in key}
        own |= objects.get(OPTIMIZER + name, {})
        if own:
            state[number] = own
    numbers = iter(range(len(names)))
    return {
        "state": state,
        "param_groups": [
            {**group, "params": [next(numbers) for _ in group["params"]]} for group in groups
        ],
    }


# ---------------------------------------------------------------------- what both sides have


def _shared(trainer: TrainerBase) -> Iterator[tuple[tuple[str, ...], object]]:
    """What is the same thing here and there, though not the same object: a reference stays one."""
    yield ("trainer",), trainer
    if trainer.has_engine:
        yield ("engine",), trainer.engine
    for name, module in trainer.model.named_modules():
        yield ("module", name), module
    for name, parameter in trainer.model.named_parameters():
        yield ("parameter", name), parameter
    for name, buffer in trainer.model.named_buffers():
        yield ("buffer", name), buffer
    yield ("optimizer",), trainer.optimizer
    if trainer.loss is not None:
        yield ("loss",), trainer.loss
    for name, value in trainer.objects.items():
        yield ("object", name), value
    for number, callback in enumerate(trainer.callbacks):
        yield ("callback", str(number)), callback


def _dumps(value: Any, known: Mapping[int, tuple[str, ...]]) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: object) -> tuple[str, ...] | None:
            return known.get(id(obj))

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _loads(data: bytes, known: Mapping[tuple[str, ...], object], trainer: TrainerBase) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, path: Any) -> Any:
            return trainer.engine if path == ("engine",) else known.get(path)

    return Unpickler(io.BytesIO(data)).load()
