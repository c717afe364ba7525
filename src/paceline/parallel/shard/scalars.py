"""Parameters without dimensions, such as a learned temperature: FSDP cannot cut them.

Every rank keeps them whole. Between steps they are DTensors like the others, so that an optimizer
can update all of them in one call; while the model runs, plain tensors take their places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from paceline.parallel.dtensor import local


class _Scalar:
    """One such parameter, and the places in the model that hold it: several where it is tied."""

    def __init__(self, resting: Tensor) -> None:
        self.places: list[tuple[nn.Module, str]] = []
        self.resting = resting
        self.working: Tensor | None = None

    def put(self, parameter: Tensor) -> None:
        for owner, name in self.places:
            owner.register_parameter(name, parameter)  # type: ignore[arg-type]

    def start(self) -> None:
        """Let the model compute with it; keeps the gradients of earlier microbatches."""
        if self.working is None:
            owner, name = self.places[0]
            self.resting = getattr(owner, name)  # loading may have put another one there
            self.working = _plain(self.resting)
        self.put(self.working)

    def stop(self) -> None:
        """Put the optimizer's parameter back."""
        if self.working is not None:
            self.put(self.resting)
            self.working = None


class Scalars:
    """The parameters without dimensions of ``root``, whole on every rank of ``mesh``."""

    def __init__(self, root: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        found: dict[int, _Scalar] = {}
        for owner in root.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.ndim == 0:
                    known = found.setdefault(id(parameter), _Scalar(parameter))
                    known.places.append((owner, name))
        self._all = list(found.values())
        for scalar in self._all:
            scalar.resting = _on(mesh, scalar.resting)
            scalar.put(scalar.resting)
        if self._all:
            root.register_forward_pre_hook(self._before_forward)
            root.register_forward_hook(self._after_forward, always_call=True)

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimizer updates."""
        return [scalar.resting for scalar in self._all]

    def used(self) -> list[bool]:
        """Which of them have a gradient on this rank."""
        return [s.working is not None and s.working.grad is not None for s in self._all]

    def finish(self, used: Sequence[bool]) -> None:
        """Average the gradients of those that are ``used`` on any rank, and give them over."""
        chosen = [scalar for scalar, flag in zip(self._all, used, strict=True) if flag]
        gradients = [_gradient(scalar) for scalar in chosen]
        if gradients and self.mesh.size() > 1:
            flat = torch.stack([gradient.double() for gradient in gradients])
            for axis in range(self.mesh.ndim):
                dist.all_reduce(flat, group=self.mesh.get_group(axis))
            flat /= self.mesh.size()
            gradients = [mean.to(g.dtype) for mean, g in zip(flat, gradients, strict=True)]
        self.stop()
        for scalar, gradient in zip(chosen, gradients, strict=True):
            like = scalar.resting
            assert isinstance(like, DTensor)
            like.grad = DTensor.from_local(
                gradient.clone(), like.device_mesh, like.placements, run_check=False
            )

    def start(self) -> None:
        """Let the model compute with them."""
        for scalar in self._all:
            scalar.start()

    def stop(self) -> None:
        """Put the optimizer's parameters back, without gradients."""
        for scalar in self._all:
            scalar.stop()
            scalar.resting.grad = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """What the model computes with, where it looks for it."""
        self.start()
        try:
            yield
        finally:
            for scalar in self._all:
                scalar.stop()

    def _before_forward(self, root: nn.Module, args: Any) -> None:
        self.start()

    def _after_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        # With a backward to come they stay until the step ends: it may compute parts again.
        if not torch.is_grad_enabled():
            for scalar in self._all:
                scalar.stop()


def _on(mesh: DeviceMesh, parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):  # spread by tensor parallelism, and computed with as such
        return parameter
    device = parameter.device
    if device.type not in ("meta", mesh.device_type):
        device = torch.device(mesh.device_type)
    whole = parameter.detach().to(device)
    spread = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _plain(resting: Tensor) -> Tensor:
    """A leaf that shares the memory of ``resting``; a DTensor only where tensor parallel."""
    assert isinstance(resting, DTensor)
    names = resting.device_mesh.mesh_dim_names or ()
    if "shards" not in names:
        return nn.Parameter(resting.detach(), requires_grad=resting.requires_grad)
    return nn.Parameter(local(resting.detach()), requires_grad=resting.requires_grad)


def _gradient(scalar: _Scalar) -> Tensor:
    """This rank's gradient as a plain tensor; zero where it has none."""
    working = scalar.working
    gradient = None if working is None else working.grad
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    return torch.zeros_like(local(scalar.resting)) if gradient is None else gradient
