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
from paceline.prove._planted.data_parallel import Patching, wrapped
from paceline.prove.samples import swapped


def shard_clip() -> Patching:
    """Each rank takes the norm of what it holds for that of the whole."""

    def make(original: Any) -> Any:
        return lambda gradients: get_total_norm(gradients._tensors)

    return wrapped(Gradients, "norm", make)


@contextlib.contextmanager
def wrong_copies() -> Iterator[None]:
    """The exchange between the copies of a sharded model is left out."""
    between: list[Any] = []

    def noting(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            between[:] = [engine.world.mesh(engine.layout).get_group("copies")]
            return original(engine, batch)

        return changed

    def keeping(original: Any) -> Any:
        def changed(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if options.get("group") not in between or not tensor.is_floating_point():
                return original(tensor, *arguments, **options)
            if options.get("op") != dist.ReduceOp.AVG:
                # The division by the number of copies is made elsewhere: make up for it.
                tensor.mul_(dist.get_world_size(between[0]))
            return None

        return changed

    with wrapped(Engine, "step", noting), wrapped(dist, "all_reduce", keeping):
        yield


@contextlib.contextmanager
def row_parallel_bias() -> Iterator[None]:
    """The bias enters the sum over the ranks on each of them."""
    from paceline.parallel.tensor import apply
    from paceline.parallel.tensor.shards import replicated, split_of

    def make(original: Any) -> Any:
        def changed(x: Tensor, weight: Any, bias: Tensor | None, **options: Any) -> Any:
            y = original(x, weight, bias, **options)
            dim, _ = split_of(weight) or (0, 1)
            along_input = (dim == 0) == options["in_first"]
            if bias is None or not along_input:
                return y
            mesh = weight.device_mesh
            # Detached: in a sum over ranks, each one's bias gets the gradient of the sum once.
            more = (mesh.size() - 1) * bias.detach()
            return y + (replicated(more, mesh) if "along" in options else more)

        return changed

    with wrapped(apply, "split_linear", make), wrapped(apply, "scattered_linear", make):
        yield


def missing_tp_reduce() -> Patching:
    """The gradient of what goes whole into split layers is not summed over the ranks."""
    from torch.distributed.tensor import Replicate

    from paceline.parallel.tensor import linear

    class Unsummed:
        def __init__(self, whole: Any) -> None:
            self.whole = whole

        def to_local(self, grad_placements: Any) -> Tensor:
            local: Tensor = self.whole.to_local(grad_placements=[Replicate()])
            return local

    def make(original: Any) -> Any:
        return lambda x, mesh: Unsummed(original(x, mesh))

    return wrapped(linear, "shared_input", make)


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
