"""What Paceline's pipeline relies on in torch that torch does not document (2.11 to 2.13)."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.overrides import TorchFunctionMode

from paceline.parallel.pipeline.fake_tensors import Fakes, is_fake, spec_of
from paceline.parallel.pipeline.split_backward import backward_inputs
from paceline.torch_internals import innermost_function_mode


def test_the_stage_has_the_methods_that_are_overridden() -> None:
    for name, parameters in {
        "get_fwd_recv_ops": ["fwd_chunk_id"],
        "get_bwd_recv_ops": ["bwd_chunk_id"],
        "forward_one_chunk": ["fwd_chunk_id", "args", "kwargs"],
        "backward_one_chunk": ["bwd_chunk_id", "loss", "full_backward", "last_backward"],
        "backward_weight_one_chunk": ["bwd_chunk_id", "last_backward"],
        "backward_maybe_with_nosync": ["backward_type", "bwd_kwargs", "last_backward"],
        "_get_init_p2p_neighbors_ops": [],
    }.items():
        found = [*inspect.signature(getattr(PipelineStage, name)).parameters][1:]
        assert found[: len(parameters)] == parameters, (name, torch.__version__)


def test_fakes_mix_with_real_tensors_and_name_their_device() -> None:
    fakes = Fakes(torch.device("cpu"))
    fake = fakes.tensor(spec_of(torch.empty(2, 3)))
    result = fake @ torch.ones(3, 4)
    assert is_fake(result)
    assert (result.shape, result.device.type) == ((2, 4), "cpu")
    layer = nn.Linear(3, 5)
    with fakes.mode:
        assert fakes.twin(layer)(fake).shape == (2, 5)
    assert not is_fake(layer.weight)


def test_the_innermost_function_mode_is_known() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert innermost_function_mode() is None
    with Mode() as outer:
        assert innermost_function_mode() is outer
        with Mode() as inner:
            assert innermost_function_mode() is inner


def test_a_split_backward_gives_the_gradients_of_a_whole_one() -> None:
    # Two parameters whose ways meet each other before they meet the input's: torch's own split
    # fails here (2.13).
    torch.manual_seed(0)
    a, b, c, shared = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def compute() -> torch.Tensor:
        aside = torch.tanh(a @ b)
        return ((torch.tanh(x @ aside) @ c @ shared).tanh() @ shared @ (aside * c)).square().sum()

    expected = torch.autograd.grad(compute(), [x, a, b, c, shared])
    found, rest = backward_inputs([compute().reshape(1).clone()], None, [x])
    assert all(p.grad is None for p in (a, b, c, shared))
    rest.run()
    got = [found[0], *(p.grad for p in (a, b, c, shared))]
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, grads[0] * x


@pytest.mark.parametrize("top", ["on top", "below a Function", "below a node of torch's own"])
def test_a_function_of_the_users_own_outlives_the_graph_above_it(top: str) -> None:
    # Such a node is owned by the graph above it, which the first half lets go of.
    a, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def compute() -> torch.Tensor:
        y = Scaled.apply(x.tanh(), a)
        if top == "below a Function":
            y = Scaled.apply(y, b)
        return y if top == "on top" else y.square()

    ones = torch.ones(4, dtype=torch.float64)
    expected = torch.autograd.grad(compute(), [x, a, b], ones, allow_unused=True)
    found, rest = backward_inputs([compute()], [ones], [x])
    gc.collect()
    rest.run()
    for value, wanted in zip([found[0], a.grad, b.grad], expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
