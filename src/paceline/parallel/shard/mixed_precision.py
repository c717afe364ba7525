"""Computing in low precision with parameters that the optimizer holds in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.nested import map_tensors

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Have every module that owns parameters take its floating-point inputs in their ``dtype``.

    Done where a parameter meets an input, and not where the batch comes in: targets keep their
    digits, and so do masks, and what a model computes in float32 on the way reaches its next layer.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(args, cast), map_tensors(kwargs, cast)

    for module in model.modules():
        if any(p.is_floating_point() for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(hook, with_kwargs=True)


def cast_result(model: nn.Module) -> None:
    """Have the results of ``model`` leave in float32, so that its loss is computed in that."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in LOW.values() else tensor

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(output, cast)

    model.register_forward_hook(hook)
