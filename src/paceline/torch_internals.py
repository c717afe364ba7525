"""What Paceline uses of torch that torch does not document, each under a name of our own.

Checked with torch 2.11 to 2.13; ``tests/test_torch_internals.py`` says what breaks when one of
these changes. Three files keep private names of torch to themselves, because all of each is about
them: ``parallel/tensor/shards.py`` (``_StridedShard``), ``parallel/pipeline/torch_schedules.py``
(methods of ``PipelineStage``) and ``diagnose/hangs/flight_recorder.py``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data._utils import worker as loader_worker

# ---- tensors without data ----

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises where a computation needs the values of a fake tensor, which has none."""

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Where torch logs, at length, why a computation on fake tensors failed."""


# ---- loader workers ----


@contextmanager
def outside_loader_worker() -> Iterator[None]:
    """Let ``get_worker_info()`` say that this process is no DataLoader worker.

    Streams look at it to give each worker a part of themselves, where all is asked for.
    """
    known = loader_worker._worker_info
    loader_worker._worker_info = None
    try:
        yield
    finally:
        loader_worker._worker_info = known


# ---- modes ----


def innermost_function_mode() -> TorchFunctionMode | None:
    """The torch function mode that sees a call first."""
    return _get_current_function_mode()


# ---- operators ----


def is_operator(value: object) -> bool:
    """Whether ``value`` is one overload of an operator, as ``torch.ops.aten.mm.default`` is."""
    return isinstance(value, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def overloads_of(packet: Any) -> list[Any] | None:
    """The overloads of an operator such as ``torch.ops.aten.mm``; ``None`` for anything else."""
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    return [getattr(packet, name) for name in packet.overloads()]


def operator_name(op: Any) -> str:
    """The name of an operator without its namespace, where that is torch's own: ``"mm"``."""
    name: str = op._schema.name
    return name.removeprefix("aten::")


def changes_arguments(op: Any) -> bool:
    """Whether an operator writes into one of its arguments."""
    return bool(op._schema.is_mutable)


def argument_names(op: Any) -> list[str]:
    """The names of an operator's arguments; none for an operator of higher order."""
    schema = getattr(op, "_schema", None)
    return [argument.name for argument in schema.arguments] if schema is not None else []


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place, in one launch on a GPU."""
    torch._foreach_mul_(list(tensors), factor)


def move_all_towards(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move tensors in place by ``weight`` of the way to their ``ends``, in one launch on a GPU."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


# ---- autograd ----


def is_python_node(node: Node) -> bool:
    """Whether a node of the graph belongs to a ``torch.autograd.Function``."""
    return isinstance(node, torch._C._FunctionBase)


def after_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the backward pass that is under way ends."""
    Variable._execution_engine.queue_callback(callback)


# ---- memory ----


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all tensors on one storage, unlike those of any other that is alive."""
    return int(storage._cdata)


# ---- meshes ----


def unflattened_mesh(
    mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """The ranks of a one-dimensional ``mesh`` as a grid, row by row; FSDP2 can cut further.

    A collective of the whole world: torch makes the groups of all ranks at once.
    """
    return mesh._unflatten(0, sizes, names)


# ---- FSDP ----


def make_fsdp_root(module: nn.Module) -> None:
    """Let FSDP know that ``module`` is a root, before a part of it runs and is taken for one.

    torch does so when the root is first called, and offers no other way.
    """
    state: Any = module
    state._get_fsdp_state()._lazy_init()


# ---- process groups ----


def default_store() -> Any:
    """The store by which the ranks of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


def abort_process_groups() -> None:
    """Abort what is under way in every NCCL communicator of this process, and forget all groups.

    ``destroy_process_group`` would wait for it, and so for ranks that may never come.
    """
    dist.distributed_c10d._abort_process_group()


# ---- modules ----

_HOOK = -1
"""The key of our hooks: torch's own are counted up from 0, so none of a user's is replaced."""


def set_shared_hooks(
    module: nn.Module,
    before: Callable[[nn.Module, Any], None],
    after: Callable[[nn.Module, Any, Any], None],
) -> None:
    """Have ``before`` and ``after`` called around the module's forward; once, however often set.

    As hooks that are registered, but under one key for all modules: compiled code holds on to the
    keys, and blocks of one kind would no longer share it.
    """
    hooks: Any = module._forward_pre_hooks
    hooks[_HOOK] = before
    hooks.move_to_end(_HOOK, last=False)
    module._forward_hooks[_HOOK] = after


def around_compiled_call(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Put ``wrap`` around the compiled code of ``module``; whether it has any (``compile()``)."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        return False
    module._compiled_call_impl = wrap(compiled)
    return True


# ---- functions of torch that are written in Python ----


def without_override_check(function: Any) -> Any:
    """``function`` of torch without its first lines, which hand the call to a mode.

    Called inside a mode, the functions that it calls are seen by the mode one by one.
    """
    names = {
        "has_torch_function": lambda _: False,
        "has_torch_function_unary": lambda _: False,
        "has_torch_function_variadic": lambda *_: False,
    }
    own = {**function.__globals__, **names}
    made = types.FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# ---- activation checkpointing ----


def around_recomputation(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have ``torch.utils.checkpoint`` recompute by ``wrap(function)``; for good, in this process.

    ``wrap`` is called before the first pass. Whoever calls ``checkpoint``: a model's own code, or
    Hugging Face's.
    """
    once = torch_checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch_checkpoint.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return once(wrap(function), *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return reentrant.apply(_second_by(wrap(function), function), *args)

    patched: Any = torch_checkpoint
    patched._checkpoint_without_reentrant_generator = generator
    patched.CheckpointFunction = Reentrant


def _second_by(again: Callable[..., Any], first: Callable[..., Any]) -> Callable[..., Any]:
    """``first`` when it is called for the first time, ``again`` from then on."""
    calls = iter((first,))

    def call(*args: Any) -> Any:
        return next(calls, again)(*args)

    return call
