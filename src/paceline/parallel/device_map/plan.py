"""Which part of a model goes to which device, by memory and by measured time."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.parallel.blocks import find_blocks
from paceline.parallel.device_map.moves import moved
from paceline.torch_internals import storage_id

# What is left of a device's free memory for everything that nobody foresaw.
_RESERVE = 0.1
# Without a sample: how long an accelerator takes for a byte of parameters, and a CPU.
_ASSUMED = {"cpu": 20e-12}
_ASSUMED_ACCELERATOR = 1e-12
# What crossing from one device to the next costs at least; keeps a model that fits on one there.
_CROSSING = 50e-6
_BACKWARD = 2.0  # a backward pass takes about twice its forward


@dataclass
class PlacedPart:
    """One part of a model: where it goes, what it holds and needs, and its measured forward."""

    name: str
    device: torch.device
    parameters: int
    needs: int
    seconds: float | None = None


@dataclass
class _ModelPart:
    name: str
    module: nn.Module | None
    parameters: int
    trainable: int
    activations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    with_it: list[_ModelPart] = field(default_factory=list)
    """Pieces that share a parameter with this one, and so go where it goes."""

    @property
    def needs(self) -> int:
        # Gradients, and two averages as Adam keeps them.
        own = self.parameters + 3 * self.trainable + self.activations
        return own + sum(piece.needs for piece in self.with_it)

    def cost(self, device: torch.device) -> float:
        if self.seconds:
            own = (1 + _BACKWARD) * self.seconds[device.type]
        else:
            own = self.parameters * _ASSUMED.get(device.type, _ASSUMED_ACCELERATOR)
        return own + sum(piece.cost(device) for piece in self.with_it)


def available_devices() -> list[torch.device]:
    """All GPUs (or other accelerators of the machine), and the CPU."""
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    found = [torch.device(kind.type, index) for index in range(count)] if kind else []
    return [*found, torch.device("cpu")]


def plan(
    model: nn.Module,
    devices: Sequence[torch.device],
    limits: Mapping[torch.device, int | str],
    sample: Callable[[nn.Module], Any] | None,
) -> list[PlacedPart]:
    """The parts of ``model`` in running order, each device with one run of them.

    Devices are taken in their order; of the cuts that fit, the one with the least time is taken,
    and among equals the one that fills the fullest device least.
    """
    for device in limits:
        if device not in devices:
            raise TrainingError(
                f"device_map: max_memory names {device}, which is not among the devices "
                f"{', '.join(map(str, devices))}."
            )
    room = {device: _room(device, limits.get(device)) for device in devices}
    pieces = _pieces(model)
    if sample is not None:
        pieces = _measured(model, pieces, devices, sample)
    heads = _tied_together(model, pieces)
    cut = _cut(heads, devices, room)
    if cut is None:
        needs = sum(piece.needs for piece in heads)
        largest = max(heads, key=lambda piece: piece.needs)
        offered = ", ".join(f"{device}: {readable(room[device])}" for device in devices)
        raise TrainingError(
            f"device_map='auto': the model needs {readable(needs)} with gradients and optimizer "
            f"state, its largest part {largest.name!r} {readable(largest.needs)}, which does not "
            f"fit into {offered}. Allow more by max_memory=, add devices, or freeze parameters."
        )
    where = {}
    for piece, device in zip(heads, cut, strict=True):
        where[piece.name] = device
        where |= {other.name: device for other in piece.with_it}
    return [
        PlacedPart(
            piece.name,
            where[piece.name],
            piece.parameters,
            piece.needs - sum(other.needs for other in piece.with_it),
            piece.seconds.get(where[piece.name].type),
        )
        for piece in pieces
    ]


def _cut(
    pieces: Sequence[_ModelPart], devices: Sequence[torch.device], room: Mapping[torch.device, int]
) -> list[torch.device] | None:
    """The device of each piece, by dynamic programming over (pieces done, devices used)."""
    whole = sum(max(piece.cost(device) for device in devices) for piece in pieces) or 1.0
    measured = any(piece.seconds for piece in pieces)
    # Costs nobody measured have no unit: then crossing only decides between equals.
    crossing = _CROSSING if measured else 1e-6 * whole
    best: dict[int, tuple[float, float, list[torch.device]]] = {0: (0.0, 0.0, [])}
    for device in devices:
        reached = dict(best)
        for start, (seconds, fill, chosen) in best.items():
            needs, cost = 0, crossing if start else 0.0
            for stop in range(start + 1, len(pieces) + 1):
                needs += pieces[stop - 1].needs
                cost += pieces[stop - 1].cost(device)
                if needs > room[device]:
                    break
                share = max(fill, needs / max(room[device], 1))
                # Rounded, so that sums taken in another order are still equal.
                total = round((seconds + cost) / whole, 9) * whole
                option = (total, share, chosen + [device] * (stop - start))
                if stop not in reached or option[:2] < reached[stop][:2]:
                    reached[stop] = option
        best = reached
    return best[len(pieces)][2] if len(pieces) in best else None


def _pieces(model: nn.Module) -> list[_ModelPart]:
    """The blocks, and between them the largest modules without a block; in the model's order."""
    blocks = set(find_blocks(model))
    found: list[_ModelPart] = []

    def look(name: str, module: nn.Module) -> None:
        start = f"{name}." if name else ""
        if name in blocks or (name and not any(block.startswith(start) for block in blocks)):
            if any(True for _ in _tensors(module)):
                found.append(_piece(name, module, module.parameters()))
            return
        for key, tensor in module.named_parameters(recurse=False):
            found.append(_piece(start + key, None, [tensor]))
        for key, buffer in module.named_buffers(recurse=False):
            found.append(_ModelPart(start + key, None, buffer.nbytes, 0))
        for key, child in module.named_children():
            look(start + key, child)

    look("", model)
    if not found:
        raise TrainingError(
            f"device_map='auto': {type(model).__name__} has no parameters to place."
        )
    return found


def _piece(name: str, module: nn.Module | None, parameters: Any) -> _ModelPart:
    unique = list({id(p): p for p in parameters}.values())
    held = sum(p.nbytes for p in unique)
    if module is not None:
        held += sum(buffer.nbytes for buffer in module.buffers())
    return _ModelPart(name, module, held, sum(p.nbytes for p in unique if p.requires_grad))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tied_together(model: nn.Module, pieces: Sequence[_ModelPart]) -> list[_ModelPart]:
    """The pieces, those that share a tensor with an earlier one hung on to it."""
    heads: list[_ModelPart] = []
    owner: dict[int, _ModelPart] = {}
    for piece in pieces:
        tensors = (
            list(_tensors(piece.module)) if piece.module is not None else [_get(model, piece.name)]
        )
        earlier = next((owner[id(t)] for t in tensors if id(t) in owner), None)
        if earlier is None:
            heads.append(piece)
        else:
            shared = sum(t.nbytes for t in tensors if id(t) in owner)
            piece.parameters -= shared
            piece.trainable -= min(shared, piece.trainable)
            earlier.with_it.append(piece)
        for tensor in tensors:
            owner.setdefault(id(tensor), earlier or piece)
    return heads


def _get(model: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def _measured(
    model: nn.Module,
    pieces: Sequence[_ModelPart],
    devices: Sequence[torch.device],
    sample: Callable[[nn.Module], Any],
) -> list[_ModelPart]:
    """The pieces in the order in which they ran, with their times and activations."""
    calls = _watch(model, pieces, sample)
    kinds = {device.type: device for device in devices}
    for piece in pieces:
        for kind, device in kinds.items():
            piece.seconds[kind] = 0.0
            if piece.name in calls:
                assert piece.module is not None
                args, kwargs = calls[piece.name]
                seconds, saved = _try_out(piece.module, args, kwargs, device)
                piece.seconds[kind] = seconds
                piece.activations = max(piece.activations, saved)
    order = {name: place for place, name in enumerate(calls)}
    # What never ran (a parameter of the model's own, say) stays before what follows it.
    place, placed = -1, []
    for piece in pieces:
        place = order.get(piece.name, place)
        placed.append((place, piece))
    return [piece for _, piece in sorted(placed, key=lambda pair: pair[0])]


def _watch(
    model: nn.Module, pieces: Sequence[_ModelPart], sample: Callable[[nn.Module], Any]
) -> dict[str, tuple[Any, Any]]:
    """With what each piece was called first, in that order; the model is left as it was."""
    calls: dict[str, tuple[Any, Any]] = {}
    handles = []
    for piece in pieces:
        if piece.module is None:
            continue

        def seen(module: nn.Module, args: Any, kwargs: Any, name: str = piece.name) -> None:
            calls.setdefault(name, (args, kwargs))

        handles.append(piece.module.register_forward_pre_hook(seen, with_kwargs=True))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            sample(model)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    if not calls:
        raise TrainingError(
            "device_map='auto': sample(model) ran no part of the model. It must call it, like "
            "sample=lambda model: model(batch)."
        )
    return calls


def _try_out(module: nn.Module, args: Any, kwargs: Any, device: torch.device) -> tuple[float, int]:
    """Seconds of a forward of a copy of ``module`` on ``device``, and bytes it saves."""
    twin = copy.deepcopy(module).to(device)
    args, kwargs = moved(args, device), moved(kwargs, device)
    own = {storage_id(t.untyped_storage()) for t in _tensors(twin)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in own:
            saved[storage_id(storage)] = storage.nbytes()
        return tensor

    times = []
    with torch.random.fork_rng():
        for _ in range(3):
            _wait(device)
            started = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                saved.clear()
                result = twin(*args, **kwargs)
            _wait(device)
            times.append(time.perf_counter() - started)
            used = sum(saved.values())
            del result
    return min(times), used


def _wait(device: torch.device) -> None:
    if device in available_devices() and device.type != "cpu":
        torch.accelerator.synchronize(device)


def _room(device: torch.device, limit: int | str | None) -> int:
    """How many bytes ``device`` may be given."""
    if limit is not None:
        return _bytes(limit)
    return int(_free(device) * (1 - _RESERVE))


def _free(device: torch.device) -> int:
    if device.type != "cpu":
        told = getattr(torch.get_device_module(device), "mem_get_info", None)
        if told is None:
            raise TrainingError(
                f"device_map='auto': {device} does not tell how much memory is free. Say how much "
                "to use by max_memory=."
            )
        return int(told(device)[0])
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except OSError:  # not Linux: all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def _bytes(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    for unit, factor in _UNITS.items():
        number = str(size).removesuffix(unit).strip()
        if str(size).endswith(unit) and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise TrainingError(
        f"device_map: max_memory {size!r} must be a number of bytes, or text like '10GiB'."
    )


def readable(size: int) -> str:
    """Bytes for people."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
