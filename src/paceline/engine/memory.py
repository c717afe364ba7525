"""Where a rank's memory goes: parameters, gradients, optimizer state, buffers, activations.

Counted are the bytes this rank really holds: its shard of a distributed tensor, a storage that
several tensors share once, and a view's whole storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.engine.ema import AveragedWeights
from paceline.nested import leaves
from paceline.parallel.device_map.plan import readable
from paceline.torch_internals import TorchDispatchMode, storage_id

STATIC = ("parameters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True)
class Memory:
    """Bytes held by one rank.

    ``gradients``, ``activations`` and ``peak`` are the most at one time during the last measured
    step; without one, gradients are those there now, and the other two ``None``. ``activations``
    is what the step needed besides parameters, buffers, optimizer state and gradients: what is
    saved for the backward, and what is under way. ``current`` is held by tensors now (on a GPU: by
    all of them), ``process`` is the resident memory of the process on its host. ``devices`` splits
    what stands by where it is kept: ``{"cuda:0": {"parameters": …}, "cpu": {…}}``. Averaged
    weights (``ema=``) count as ``optimizer``.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    current: int
    process: int
    activations: int | None = None
    peak: int | None = None
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, for an event or another rank."""
        return dataclasses.asdict(self)

    def mib(self) -> dict[str, float]:
        """What is known, by name, in MiB: to log, or to print beside ``nvidia-smi``."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: size / 2**20 for name, size in sizes.items() if isinstance(size, int)}

    def __str__(self) -> str:
        rows = [(name, getattr(self, name)) for name in (*STATIC, "activations", "peak", "current")]
        return ", ".join(f"{name} {readable(size)}" for name, size in rows if size is not None)


def measure(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> Memory:
    """What ``model`` and ``optimizer`` hold on this rank now."""
    return _memory(_standing(model, optimizer), device)


class MemoryMeter:
    """Measures a step: ``with meter.step(): engine.step(batch)``, then ``memory``.

    On a GPU torch's allocator keeps count; on a CPU every operator is looked at, which costs time.
    What a compiled part allocates inside itself is seen on a GPU only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        device: torch.device,
        average: AveragedWeights | None = None,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self._average = average
        self._last: tuple[int, int, int] | None = None

    def memory(self) -> Memory:
        """What is held now, with the peaks of the last measured step."""
        standing = self._standing()
        now = _memory(standing, self.device)
        if self._last is None:
            return now
        gradients, activations, peak = self._last
        return dataclasses.replace(now, gradients=gradients, activations=activations, peak=peak)

    def _standing(self) -> _Standing:
        found = _standing(self.model, self.optimizer)
        if self._average is not None:
            found.add("optimizer", self._average.tensors())
        return found

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure what runs inside: one forward and backward, or several, and the update."""
        watch: _CpuWatch | _GpuWatch
        watch = _CpuWatch(self._standing()) if self.device.type == "cpu" else _GpuWatch(self.device)
        with contextlib.ExitStack() as hooks:
            for parameter in _parameters(self.model, self.optimizer):
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(watch.accumulated)
                    hooks.callback(handle.remove)
            if self.optimizer is not None:
                # The update's own temporaries, and the state its first makes, are no activations.
                handle = self.optimizer.register_step_pre_hook(lambda *_: watch.updates())
                hooks.callback(handle.remove)
            with watch:
                yield
        self._last = (watch.gradients.most, watch.activations, watch.peak)


class _Gradients:
    """The storages that became gradients, seen as they are accumulated."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.most = 0

    def add(self, gradient: Tensor) -> None:
        for key, storage in _storages(gradient):
            size = storage.nbytes()
            self.now += size - self.sizes.get(key, 0)
            self.sizes[key] = size
        self.most = max(self.most, self.now)

    def free(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


class _GpuWatch(contextlib.AbstractContextManager[None]):
    """Peaks from torch's allocator; ``activations`` is what the step added, less gradients."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._without_gradients: int | None = None
        self._until_update: int | None = None
        self.gradients = _Gradients()
        self.activations = self.peak = 0

    def __enter__(self) -> None:
        self._module.synchronize(self._device)
        self._module.reset_peak_memory_stats(self._device)
        self._start = self._module.memory_allocated(self._device)

    def accumulated(self, parameter: Tensor) -> None:
        """A gradient has come."""
        if self._without_gradients is None:
            self._without_gradients = self._added()
        if parameter.grad is not None:
            self.gradients.add(parameter.grad)

    def updates(self) -> None:
        """The backward is done: the optimizer is about to work."""
        if self._until_update is None:
            self._until_update = self._added()

    def _added(self) -> int:
        return int(self._module.max_memory_allocated(self._device)) - self._start

    def __exit__(self, *error: Any) -> None:
        self._module.synchronize(self._device)
        added = self._added()
        self.peak = self._start + added
        whole = added if self._until_update is None else self._until_update
        # The peak lies before the first gradient, or with all of them there: the larger is right.
        before = whole if self._without_gradients is None else self._without_gradients
        self.activations = max(before, whole - self.gradients.most, 0)


class _CpuWatch(TorchDispatchMode):
    """Counts the storages that operators make, until they are freed."""

    def __init__(self, standing: _Standing) -> None:
        super().__init__()
        self.gradients = _Gradients()
        self._known = set(standing.keys)
        self._start = standing.total
        self._live: dict[int, tuple[int, Any]] = {}
        self._bytes = 0
        self._updating = False
        self.activations = 0
        self.peak = self._start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._see(tensor)
        return result

    def accumulated(self, parameter: Tensor) -> None:
        """A gradient has come."""
        if parameter.grad is not None:
            self._see(parameter.grad)
            self.gradients.add(parameter.grad)

    def updates(self) -> None:
        """The backward is done: the optimizer is about to work."""
        self._updating = True

    def _see(self, tensor: Tensor) -> None:
        for key, storage in _storages(tensor):
            size, before = storage.nbytes(), self._live.get(key)
            if key in self._known or (before is not None and before[0] == size):
                continue
            forget = functools.partial(self._free, key)
            self._live[key] = size, before[1] if before else weakref.ref(storage, forget)
            self._bytes += size - (before[0] if before else 0)
            if self._is_record():
                self._look_again()
            self.peak = max(self.peak, self._start + self._bytes)
            if not self._updating:
                self.activations = max(self.activations, self._bytes - self.gradients.now)

    def _is_record(self) -> bool:
        return self._start + self._bytes > self.peak or (
            not self._updating and self._bytes - self.gradients.now > self.activations
        )

    def _look_again(self) -> None:
        """Storages may have been emptied in place: FSDP does so with parameters it lets go of."""
        for key, (size, reference) in list(self._live.items()):
            storage = reference()
            now = 0 if storage is None else storage.nbytes()
            if now != size:
                self._live[key] = now, reference
                self._bytes += now - size

    def _free(self, key: int, reference: Any) -> None:
        self._bytes -= self._live.pop(key)[0]
        self.gradients.free(key)


@dataclass
class _Standing:
    """The unique storages behind a model and its optimizer, by what they are and where."""

    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATIC, 0))
    devices: dict[str, dict[str, int]] = field(default_factory=dict)
    keys: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for key, storage in _storages(tensor):
                if key in self.keys:
                    continue
                self.keys.add(key)
                size = storage.nbytes()
                self.sizes[kind] += size
                place = self.devices.setdefault(str(storage.device), dict.fromkeys(STATIC, 0))
                place[kind] += size


def _standing(model: nn.Module, optimizer: Optimizer | None) -> _Standing:
    found = _Standing()
    parameters = _parameters(model, optimizer)
    found.add("parameters", parameters)
    found.add("gradients", (p.grad for p in parameters if p.grad is not None))
    found.add("buffers", model.buffers())
    if optimizer is not None:
        found.add("optimizer", _tensors_in(optimizer.state))
    return found


def _memory(standing: _Standing, device: torch.device) -> Memory:
    if device.type == "cpu":
        current = standing.total
    else:
        current = int(torch.get_device_module(device).memory_allocated(device))
    return Memory(**standing.sizes, current=current, process=_resident(), devices=standing.devices)


def _parameters(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Those of the model, and those of the optimizer that are others: FSDP's own shards, say."""
    held: list[Tensor] = list(model.parameters())
    seen = {id(parameter) for parameter in held}
    groups = optimizer.param_groups if optimizer is not None else []
    return held + [p for group in groups for p in group["params"] if id(p) not in seen]


def _storages(tensor: Tensor) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """The storages this rank keeps for ``tensor``, each with an identity; none on meta."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            yield from _storages(tensor.to_local())
    elif tensor.layout == torch.sparse_coo:
        yield from _storages(tensor._values())
        yield from _storages(tensor._indices())
    elif hasattr(tensor, "__tensor_flatten__"):  # a subclass that wraps others: quantized, jagged
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.device.type != "meta":
        storage = tensor.untyped_storage()
        yield storage_id(storage), storage


def _tensors_in(value: Any) -> Iterator[Tensor]:
    for leaf in leaves(value, every_field=True):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, set | frozenset):
            yield from _tensors_in(list(leaf))


def _resident() -> int:
    """Bytes of physical memory this process has; its peak where the system tells no more."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024
    except OSError:  # not Linux
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used if sys.platform == "darwin" else used * 1024
