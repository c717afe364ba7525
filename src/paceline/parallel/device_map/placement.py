"""A model over several devices of one process, for one host and no launcher.

Modules stay where the map puts them and tensors come to them: each placed module moves its inputs
to its own device, and the backward goes the same way back, since moving is differentiable. Where
the code between them brings tensors from different devices together (a residual, a skip
connection), the smaller ones are moved. So the numbers are those of one device.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import TrainingError
from paceline.parallel.device_map.moves import Align, moved
from paceline.parallel.device_map.plan import PlacedPart, available_devices, plan, readable

DeviceLike = str | int | torch.device
_FORWARD = "_paceline_unaligned_forward"


@dataclass
class DeviceMap:
    """Where each part of a model is; made by ``place``, prints as a table."""

    modules: dict[str, torch.device]
    """The placed modules by name; a parameter that a mixed module owns itself is there too."""
    rows: Sequence[PlacedPart] = ()
    _handles: list[RemovableHandle] = field(default_factory=list, repr=False)
    _aligned: list[nn.Module] = field(default_factory=list, repr=False)

    @property
    def devices(self) -> list[torch.device]:
        """Every device in use, in the order in which the model names them."""
        return list(dict.fromkeys(self.modules.values()))

    def remove(self) -> None:
        """Take the hooks off; the parameters stay where they are."""
        for handle in self._handles:
            handle.remove()
        for module in self._aligned:
            vars(module).pop("forward")
            earlier = vars(module).pop(_FORWARD, None)
            if earlier is not None:
                module.forward = earlier
        self._handles.clear()
        self._aligned.clear()

    def __str__(self) -> str:
        width = max(len("module"), *(len(row.name) for row in self.rows)) + 2
        lines = [f"{'module':{width}}{'device':10}{'parameters':>12}{'needs':>12}{'ms':>10}"]
        for row in self.rows:
            time = "" if row.seconds is None else f"{1000 * row.seconds:.2f}"
            lines.append(
                f"{row.name or '(all)':{width}}{row.device!s:10}{readable(row.parameters):>12}"
                f"{readable(row.needs):>12}{time:>10}"
            )
        return "\n".join(lines)


def place(
    model: nn.Module,
    device_map: str | Mapping[str, DeviceLike],
    *,
    devices: Sequence[DeviceLike] | None = None,
    sample: Callable[[nn.Module], Any] | None = None,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
) -> DeviceMap:
    """Spread ``model`` over devices, in place: its parameters move, and so will its inputs.

    ``device_map`` maps names of modules (or parameters) to devices; the longest name that a
    parameter begins with decides, ``""`` stands for the rest. ``"auto"`` splits the model, in the
    order in which it runs, over ``devices`` (by default all GPUs, then the CPU) so that each part
    fits with its gradients, optimizer state and activations, on the fastest devices first.
    ``sample(model)`` runs a typical forward pass, by which time and activations are measured;
    ``max_memory`` bounds what a device is given, as in ``{"cuda:0": "10GiB"}``.

    Parameters keep their identity, so that an optimizer made before goes on working.
    """
    _check_model(model)
    rows: Sequence[PlacedPart] = ()
    if isinstance(device_map, str):
        if device_map != "auto":
            raise TrainingError(
                f"device_map={device_map!r} must be 'auto' or a mapping from names of modules to "
                "devices, like {'blocks.0': 'cuda:0', '': 'cpu'}."
            )
        wanted = _devices(devices) if devices is not None else available_devices()
        limits = {_device(key): size for key, size in (max_memory or {}).items()}
        rows = plan(model, wanted, limits, sample)
        chosen = {row.name: row.device for row in rows}
    else:
        if max_memory is not None or devices is not None:
            raise TrainingError(
                "device_map: devices= and max_memory= guide device_map='auto'; with a mapping, "
                "which decides itself, leave them out."
            )
        chosen = _checked_map(model, device_map)
    homes = _homes(model, chosen)
    _check_ties(model, homes)
    _move(model, homes)
    result = DeviceMap({}, rows)
    _hook("", model, homes, result)
    result.rows = rows or _rows(model, result.modules)
    return result


def _check_model(model: nn.Module) -> None:
    if hasattr(model, "hf_device_map"):
        raise TrainingError(
            "device_map: this model was already placed by transformers (device_map= in "
            "from_pretrained), whose hooks would move tensors a second time. Load it without."
        )
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise TrainingError(
                f"device_map: {name!r} is on the meta device and has no values to move. "
                "Materialise the model first."
            )


def _checked_map(model: nn.Module, device_map: Mapping[str, DeviceLike]) -> dict[str, torch.device]:
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in _tensors(model)}
    chosen = {}
    for name, device in device_map.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise TrainingError(
                f"device_map: {type(model).__name__} has no module or parameter {name!r}.{hint}"
            )
        chosen[name] = _device(device, name)
    return chosen


def _devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    if not devices:
        raise TrainingError("device_map: devices is empty. Name at least one device.")
    return list(dict.fromkeys(_device(device) for device in devices))


def _device(wanted: DeviceLike, name: str | None = None) -> torch.device:
    """``wanted`` as a device that is there, with its index written out."""
    there = available_devices()
    try:
        device = (
            torch.device(there[0].type, wanted) if isinstance(wanted, int) else torch.device(wanted)
        )
        # Says whether it is there, and which one a device without an index is.
        device = torch.empty(0, device=device).device
        if device.type != "meta":
            return device
    except (RuntimeError, AssertionError, ImportError):
        pass
    where = "" if name is None else f"{name!r}: "
    raise TrainingError(
        f"device_map: {where}device {str(wanted)!r} is not there. There are: "
        f"{', '.join(map(str, there))}."
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _homes(model: nn.Module, chosen: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """The device of each parameter and buffer, by the longest name it begins with."""
    homes = {}
    for name, _ in _tensors(model):
        prefix = name
        while prefix not in chosen and prefix:
            prefix = prefix.rpartition(".")[0]
        if prefix not in chosen:
            raise TrainingError(
                f"device_map: nothing says where {name!r} goes. Add it or a module around it, or "
                "'' for all the rest."
            )
        homes[name] = chosen[prefix]
    return homes


def _check_ties(model: nn.Module, homes: Mapping[str, torch.device]) -> None:
    first: dict[int, str] = {}
    for name, tensor in _tensors(model):
        known = first.setdefault(id(tensor), name)
        if homes[known] != homes[name]:
            raise TrainingError(
                f"device_map: {known!r} and {name!r} are one tensor (tied), but are mapped to "
                f"{homes[known]} and {homes[name]}. Put both on one device."
            )


@torch.no_grad()
def _move(model: nn.Module, homes: Mapping[str, torch.device]) -> None:
    made: dict[int, Tensor] = {}
    for name, tensor in list(_tensors(model)):
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if id(tensor) not in made:
            made[id(tensor)] = _on(tensor, homes[name])
        if made[id(tensor)] is not tensor:
            setattr(owner, last, made[id(tensor)])
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN wants the weights in one piece
            module.flatten_parameters()


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; a parameter stays the same object where torch allows it."""
    if tensor.device == device:
        return tensor
    there = tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return there
    gradient = None if tensor.grad is None else tensor.grad.to(device)
    tensor.grad = None
    try:
        tensor.data = there
    except RuntimeError:  # a backend whose tensors are of another kind: a new object it is
        tensor = nn.Parameter(there, requires_grad=tensor.requires_grad)
    tensor.grad = gradient
    return tensor


def _hook(
    name: str, module: nn.Module, homes: Mapping[str, torch.device], result: DeviceMap
) -> None:
    """Hooks on the largest modules that lie on one device; alignment in those above them."""
    start = f"{name}." if name else ""
    held = {homes[start + inner] for inner, _ in _tensors(module)}
    if len(held) == 1:
        device = held.pop()
        result.modules[name] = device
        hook = functools.partial(_bring_inputs, device)
        result._handles.append(
            module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        )
        return
    if not held:  # nothing to compute with: it works where its inputs are
        return
    for inner, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        result.modules[start + inner] = homes[start + inner]
    _align(module, result)
    for key, child in module.named_children():
        _hook(start + key, child, homes, result)


def _bring_inputs(
    device: torch.device, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    return moved(args, device), moved(kwargs, device)


def _align(module: nn.Module, result: DeviceMap) -> None:
    """Run ``module``'s own code so that operands from several devices meet on one."""
    if module in result._aligned:
        return
    if "forward" in vars(module):
        setattr(module, _FORWARD, vars(module)["forward"])

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = vars(self).get(_FORWARD) or functools.partial(type(self).forward, self)
        with Align.once():
            return inner(*args, **kwargs)

    # A bound method, not a closure over the module: a deep copy of the model gets its own.
    module.forward = types.MethodType(forward, module)
    result._aligned.append(module)


def _rows(model: nn.Module, modules: Mapping[str, torch.device]) -> list[PlacedPart]:
    sizes = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    trainable = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}

    def inside(prefix: str, found: Mapping[str, int]) -> int:
        start = f"{prefix}." if prefix else ""
        return sum(size for n, size in found.items() if n == prefix or n.startswith(start))

    return [
        # Parameters and gradients, and the two averages of Adam.
        PlacedPart(
            name, device, inside(name, sizes), inside(name, sizes) + 3 * inside(name, trainable)
        )
        for name, device in modules.items()
    ]
