"""Making all ranks start alike: parameters, optimizer states and objects sent by one rank."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from paceline.compat.horovod.torch.mpi_ops import (
    ProcessSet,
    allgather,
    broadcast_,
    broadcast_async_,
    global_process_set,
    rank,
    synchronize,
)


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters with those of ``root_rank``.

    ``params`` is ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors or of
    pairs of name and tensor.
    """
    handles = [
        broadcast_async_(_as_tensor(name, value), root_rank, name, process_set)
        for name, value in _named(params)
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Any) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, list | tuple | Iterator):
        return [item if isinstance(item, tuple) else (None, item) for item in params]
    raise ValueError(
        f"invalid params of type: {type(params)}; give model.state_dict(), "
        "model.named_parameters() or a list of tensors."
    )


def _as_tensor(name: str | None, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{name}: only tensors can be overwritten in place, got {type(value).__name__}. Send "
            "it with broadcast_object and assign what comes back."
        )
    return value.data if value.requires_grad else value


@dataclass(frozen=True)
class _TensorInState:
    """Stands in an optimizer's state for a tensor, which is sent by itself."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite an optimizer's state and hyperparameters with those of ``root_rank``.

    Any optimizer will do, before or after its first step. ``model`` is not needed.
    """
    if isinstance(model, ProcessSet):
        process_set = model
    is_root = rank() == root_rank
    tensors: list[torch.Tensor] = []
    told = _describe(optimizer, tensors) if is_root else None
    told = broadcast_object(told, root_rank, "broadcast_optimizer_state", process_set)
    _check_same_groups(optimizer, told)
    if not is_root:
        tensors = _take(optimizer, told)
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer_state.{index}", process_set)
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if not told["state"]:
        _give_gradients(optimizer)


def _describe(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """The state with a stand-in for every tensor; the tensors are added to ``tensors``."""

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _TensorInState(value.shape, value.dtype, value.device.type == "cpu")
        return value

    told: dict[str, Any] = _mapped(optimizer.state_dict(), described)
    return told


def _take(optimizer: torch.optim.Optimizer, told: dict[str, Any]) -> list[torch.Tensor]:
    """Put what was told into the optimizer; the tensors that are still to be received.

    They are put there as they are: ``load_state_dict`` would cast them to the parameter's dtype.
    """
    received: list[torch.Tensor] = []
    params = dict(
        zip(
            (number for group in told["param_groups"] for number in group["params"]),
            (param for group in optimizer.param_groups for param in group["params"]),
            strict=True,
        )
    )
    places = {number: param.device for number, param in params.items()}
    first = next(iter(places.values()), torch.device("cpu"))

    def taken(value: Any, device: torch.device) -> Any:
        if isinstance(value, _TensorInState):
            place = torch.device("cpu") if value.on_cpu else device
            received.append(torch.empty(value.shape, dtype=value.dtype, device=place))
            return received[-1]
        return value

    for key, value in told["state"].items():
        owner = params.get(key, key)  # an optimizer may keep what belongs to no parameter
        take = functools.partial(taken, device=places.get(key, first))
        optimizer.state[owner] = _mapped(value, take)
    for group, options in zip(optimizer.param_groups, told["param_groups"], strict=True):
        options = {name: value for name, value in options.items() if name != "params"}
        group.update(_mapped(options, functools.partial(taken, device=first)))
    return received


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` applied to everything in its dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _check_same_groups(optimizer: torch.optim.Optimizer, told: dict[str, Any]) -> None:
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in told["param_groups"]]
    if here != there:
        raise ValueError(
            f"the optimizer has groups of {here} parameters on this rank, but of {there} on the "
            "rank that sends its state. Build the model and the optimizer alike on all ranks."
        )


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters a gradient of zeros, which they have after this call in Horovod."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """What ``root_rank`` has passed as ``obj``; on all other ranks ``obj`` does not matter."""
    name = "broadcast_object" if name is None else name
    is_root = rank() == root_rank
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpickled(content)


def broadcast_object_fn(
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that sends an object from ``root_rank`` to all ranks, each time it is called."""

    def send(obj: Any = None) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return send


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of their ranks."""
    name = "allgather_object" if name is None else name
    content = _pickled(obj)
    lengths = allgather(torch.tensor([content.numel()]), f"{name}.sz", process_set)
    gathered = allgather(content, f"{name}.t", process_set)
    return [_unpickled(part) for part in gathered.split(lengths.tolist())]


def _pickled(obj: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpickled(content: torch.Tensor) -> Any:
    return cloudpickle.loads(content.numpy().tobytes())
