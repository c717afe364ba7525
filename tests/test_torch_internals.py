"""What Paceline relies on in torch that torch does not document: 2.11 to 2.13 have all of it.

Should one of these fail with a later torch, ``paceline/torch_internals.py`` is the file to change;
each test says what would break.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import paceline
from paceline import torch_internals

SOURCE = Path(paceline.__file__).parent
KNOW_TORCH = {
    "torch_internals.py",
    "parallel/tensor/shards.py",
    "parallel/pipeline/torch_schedules.py",
    "diagnose/hangs/flight_recorder.py",
}
PRIVATE = re.compile(
    r"^\s*from torch[\w.]*\._\w+|^\s*from torch.* import .*\b_\w|\btorch\.[\w.]*\b_[a-zA-Z]"
)
NAMES_ONLY = ('"torch._dynamo"',)  # imported ahead of time, never used by name


def test_private_names_of_torch_are_in_the_files_that_say_so() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in KNOW_TORCH
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line.partition("#")[0])
        and "torch.__version__" not in line
        and "torch.__file__" not in line
        and not any(name in line for name in NAMES_ONLY)
        and "*aten._" not in line
    ]
    assert not found, "\n".join(found)


def test_fake_tensors_compute_shapes_and_say_when_values_are_needed() -> None:
    # Cutting a pipeline and finding a tensor-parallel plan both run the model on fake tensors.
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    data = torch.empty(2, 3, device="meta")
    fake = torch_internals.FakeTensor(mode, data, torch.device("cpu"))
    product = fake @ torch.ones(3, 4)
    assert isinstance(product, torch_internals.FakeTensor)
    assert (tuple(product.shape), product.device.type) == ((2, 4), "cpu")
    with pytest.raises(torch_internals.NEEDS_DATA):
        product.sum().item()
    with pytest.raises(torch_internals.NEEDS_DATA):
        product.nonzero()


def test_the_innermost_function_mode_is_known() -> None:
    # A pipeline stage would look at operations inside its modules too.
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    assert torch_internals.innermost_function_mode() is None
    with Mode(), Mode() as inner:
        assert torch_internals.innermost_function_mode() is inner


def test_a_dispatch_mode_sees_operators_and_their_schemas() -> None:
    # Memory is measured, and plans are found, operator by operator.
    seen: list[tuple[str, bool]] = []

    class Watch(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(
                (torch_internals.operator_name(func), torch_internals.changes_arguments(func))
            )
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(2, 2).mm(torch.eye(2)).add_(1)
    assert ("mm", False) in seen
    assert ("add_", True) in seen


def test_operators_are_told_from_their_packets() -> None:
    # Recompute(keep=[...]) takes both.
    aten = torch.ops.aten
    assert torch_internals.is_operator(aten.mm.default)
    assert not torch_internals.is_operator(aten.mm)
    overloads = torch_internals.overloads_of(aten.mm)
    assert overloads is not None
    assert aten.mm.default in overloads
    assert torch_internals.overloads_of("aten.mm") is None
    assert torch_internals.argument_names(aten.mm.default) == ["self", "mat2"]


def test_all_gradients_are_multiplied_at_once() -> None:
    # Clipping and loss scaling would fail.
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    torch_internals.multiply_all(tensors, torch.tensor(3.0))
    assert [t.tolist() for t in tensors] == [[3.0, 3.0], [6.0, 6.0, 6.0]]
    torch_internals.move_all_towards(tensors, [torch.ones(2), torch.ones(3)], 0.5)
    assert [t.tolist() for t in tensors] == [[2.0, 2.0], [3.5, 3.5, 3.5]]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def test_nodes_of_the_users_own_functions_are_known() -> None:
    # A split backward would lose them (torch 2.11).
    x = torch.ones(2, requires_grad=True)
    mine, torchs = Scaled.apply(x).grad_fn, (x * 2).grad_fn
    assert torch_internals.is_python_node(mine)
    assert torchs is not None
    assert not torch_internals.is_python_node(torchs)


def test_a_callback_runs_when_the_backward_ends() -> None:
    # Gradients of unused parameters would be filled in too early, or never.
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: torch_internals.after_backward(lambda: order.append("end")))
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y.sum().backward()
    assert order == ["gradient", "end"]


def test_tensors_on_one_storage_are_known() -> None:
    # Memory would be counted twice.
    x, other = torch.ones(4), torch.ones(4)
    assert torch_internals.storage_id(x[1:].untyped_storage()) == torch_internals.storage_id(
        x.untyped_storage()
    )
    assert torch_internals.storage_id(other.untyped_storage()) != torch_internals.storage_id(
        x.untyped_storage()
    )


def test_fsdp_takes_a_root_before_it_runs() -> None:
    # A call of a part of a sharded model, ahead of its first step, would fail.
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        torch_internals.make_fsdp_root(model)
        model[0](torch.ones(1, 4))
        model(torch.ones(1, 4))
        other = nn.Sequential(nn.Linear(4, 4))
        fully_shard(other[0])
        fully_shard(other)
        other[0](torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="root"):
            other(torch.ones(1, 4))
    finally:
        dist.destroy_process_group()


def test_aborting_forgets_every_process_group() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    dist.new_group([0])
    torch_internals.abort_process_groups()
    assert not dist.is_initialized(), torch.__version__
    dist.init_process_group("fake", rank=0, world_size=2)  # as if there had never been one
    dist.destroy_process_group()


def test_modules_and_tensors_have_the_attributes_that_are_read() -> None:
    # Hooks of a unit, its parameters by name, and whether a value was changed or is a view.
    module = nn.Linear(2, 2)
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        assert isinstance(getattr(module, name), dict), (name, torch.__version__)
    handle = module.register_forward_hook(lambda *_: None, with_kwargs=True)
    assert handle.id in module._forward_hooks_with_kwargs
    x = torch.ones(3)
    before = x._version
    x.add_(1)
    assert x._version > before
    assert x[1:]._base is x
    assert x[1:]._is_view()
    assert not x._is_view()


def test_hooks_under_one_key_run_around_a_forward() -> None:
    """torch 2.11 to 2.13: hooks are held in ordered dicts of the module, by any key."""
    module, called = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: called.append("user"))
    for _ in range(2):  # set again, they do not run twice
        torch_internals.set_shared_hooks(
            module, lambda *_: called.append("before"), lambda *_: called.append("after")
        )
    module(torch.ones(1, 2))
    assert called == ["before", "user", "after"]


def test_a_function_without_its_override_check_calls_on_inside_a_mode() -> None:
    """torch 2.11 to 2.13: its functions in Python ask ``has_torch_function*`` of their module."""

    class Seen(TorchFunctionMode):
        names: ClassVar[list[str]] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch_internals.without_override_check(F.gumbel_softmax)(torch.ones(2, 3))
    assert "exponential_" in seen.names
    assert "gumbel_softmax" not in seen.names


def test_compiled_code_of_a_module_can_be_wrapped() -> None:
    """torch 2.11 to 2.13: ``Module.compile`` leaves it in ``_compiled_call_impl``."""
    module = nn.Linear(2, 2)
    assert not torch_internals.around_compiled_call(module, lambda compiled: compiled)
    module.compile(backend="eager")
    assert torch_internals.around_compiled_call(module, lambda compiled: lambda *_: "wrapped")
    assert module(torch.ones(1, 2)) == "wrapped"


def test_a_stream_can_be_read_as_if_outside_a_loader_worker() -> None:
    """Else a Hugging Face stream gives a loader worker only its own part of a shard."""

    class Asks(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            before = torch.utils.data.get_worker_info()
            with torch_internals.outside_loader_worker():
                inside = torch.utils.data.get_worker_info()
            yield before is None, inside is None, torch.utils.data.get_worker_info() is before

    data = torch.utils.data.DataLoader(Asks(), batch_size=None, num_workers=1)
    assert list(next(iter(data))) == [False, True, True]
