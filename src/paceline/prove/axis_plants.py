"""Planted bugs in what is special to sharded, tensor-parallel and pipelined models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from paceline.engine import Engine
from paceline.engine.gradients import Gradients
from paceline.prove.data_plants import Patching, wrapped
from paceline.prove.samples import swapped


def shard_clip() -> Patching:
    """Each rank takes the norm of what it holds for that of the whole."""

    def make(original: Any) -> Any:
        return lambda gradients: get_total_norm(gradients._tensors)

    return wrapped(Gradients, "norm", make)


def wrong_copies() -> Patching:
    """The exchange between the copies of a sharded model is left out."""
    between: list[dist.ProcessGroup] = []

    def noting(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            between[:] = [engine.world.mesh(engine.layout).get_group("copies")]
            return original(engine, batch)

        return changed

    def keeping(original: Any) -> Any:
        def changed(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if options.get("group") in between and tensor.is_floating_point():
                # The division by the number of copies comes with the sum.
                if options.get("op") != dist.ReduceOp.AVG:
                    tensor.mul_(dist.get_world_size(between[0]))
                return None
            return original(tensor, *arguments, **options)

        return changed

    stack = contextlib.ExitStack()
    stack.enter_context(wrapped(Engine, "step", noting))
    stack.enter_context(wrapped(dist, "all_reduce", keeping))
    return stack  # type: ignore[return-value]


def row_parallel_bias() -> Patching:
    """The bias enters the sum over the ranks on each of them."""
    from paceline.parallel.tensor import linear
    from paceline.parallel.tensor.shards import split_of

    def make(original: Any) -> Any:
        def changed(x: Tensor, weight: Any, bias: Tensor | None, **options: Any) -> Any:
            y = original(x, weight, bias, **options)
            dim, _ = split_of(weight) or (0, 1)
            along_input = (dim == 0) == options.get("in_first", False)
            if bias is None or not along_input:
                return y
            return y + (weight.device_mesh.size() - 1) * bias

        return changed

    return wrapped(linear, "split_linear", make)


@contextlib.contextmanager
def missing_tp_reduce() -> Iterator[None]:
    """The gradient of what goes whole into split layers is not summed over the ranks."""
    yield


def untied_stages() -> Patching:
    """The copies of a tied weight keep their own stages' gradients."""
    from paceline.parallel.pipeline import Pipeline

    return swapped(Pipeline, "sync_tied", lambda pipeline: None)


def pipeline_scale() -> Patching:
    """The loss is divided by the number of microbatches, of which it is a mean already."""
    from paceline.parallel.pipeline import Pipeline

    def make(original: Any) -> Any:
        def changed(pipeline: Any, parts: Any, scale: Tensor) -> Any:
            return original(pipeline, parts, scale / len(parts))

        return changed

    return wrapped(Pipeline, "step", make)
