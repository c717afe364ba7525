"""Linear layers over split weights: what they are, how they run, and as modules of their own."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.parallel.tensor.shards import (
    as_split,
    as_whole,
    cut,
    gathered,
    placement,
    replicated,
    split_of,
    summed,
    wrap,
)
from paceline.world import Group, World


def split_linear(
    x: Tensor, weight: DTensor, bias: Tensor | None, *, in_first: bool = False
) -> DTensor | Tensor:
    """``x @ weight.T + bias`` (``x @ weight`` with ``in_first``) with a split weight.

    Split along its output, the result is split along its last dimension and ``x`` is needed whole;
    split along its input, ``x`` is needed split and the result is the sum over the ranks, plain.
    """
    found = split_of(weight)
    if found is None:
        raise LayoutError(f"split_linear: the weight {weight.placements} is not split.")
    dim, chunks = found
    if (dim == 0) != in_first:
        return _column(x, weight, bias, in_first, chunks)
    partial = partial_linear(x, weight, in_first=in_first)
    total = summed(partial, weight.device_mesh)
    return total if bias is None else total + bias


def partial_linear(x: Tensor, weight: DTensor, *, in_first: bool) -> Tensor:
    """This rank's term of a product whose sum over the ranks is the whole."""
    local = as_split(x, weight.device_mesh, -1).to_local()
    matrix = weight.to_local()
    return F.linear(local, matrix.t() if in_first else matrix)


def scattered_linear(
    x: Tensor, weight: DTensor, bias: Tensor | None, *, in_first: bool, along: int
) -> Tensor:
    """A row-parallel product whose result is left split along dimension ``along``."""
    mesh = weight.device_mesh
    partial = partial_linear(x, weight, in_first=in_first)
    total = DTensor.from_local(partial, mesh, [Partial()], run_check=False)
    spread = total.redistribute(mesh, [Shard(along)])
    return spread if bias is None else spread + replicated(bias, mesh)


def _column(
    x: Tensor, weight: DTensor, bias: Tensor | None, in_first: bool, chunks: int
) -> DTensor:
    mesh = weight.device_mesh
    # Each rank's output depends on all of x: its gradient is a term of a sum.
    whole = shared_input(x, mesh).to_local(grad_placements=[Partial()])
    matrix = weight.to_local()
    local_bias = None
    if bias is not None:
        bias = bias if isinstance(bias, DTensor) else wrap_like_rows(bias, mesh, chunks)
        local_bias = bias.to_local()
    y = F.linear(whole, matrix.t() if in_first else matrix, local_bias)
    features = weight.shape[1 if in_first else 0]
    return wrap(y, mesh, placement(y.ndim - 1, chunks), torch.Size((*y.shape[:-1], features)))


def wrap_like_rows(bias: Tensor, mesh: DeviceMesh, chunks: int) -> DTensor:
    """A bias that every rank holds whole, cut like the rows of the weight it belongs to."""
    if chunks == 1:
        return as_split(bias, mesh, 0)
    apart = replicated(bias, mesh).to_local(grad_placements=[Partial()])
    return wrap(cut(apart, mesh, 0, chunks), mesh, placement(0, chunks), bias.shape)


def shared_input(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """``x`` whole on every rank, made once for all layers that read it.

    Queries, keys and values are made from the same input. Wrapped once, their gradients are added
    up before they are summed over the ranks: one all-reduce instead of three.
    """
    # A leaf would hold its wrapper, and the wrapper's graph the leaf, for ever.
    lasting = x.is_leaf and x.requires_grad
    if lasting or x.is_inference() or torch.compiler.is_compiling():
        return as_whole(x, mesh)
    key = (x._version, torch.is_grad_enabled(), mesh)
    known: tuple[Any, DTensor] | None = getattr(x, "_paceline_whole", None)
    if known is not None and known[0] == key:
        return known[1]
    whole = as_whole(x, mesh)
    x._paceline_whole = (key, whole)  # type: ignore[attr-defined]
    return whole


Ranks = DeviceMesh | Group | int
"""Over which ranks a layer is spread: a mesh, a group, or how many neighbours."""
_MESHES: weakref.WeakKeyDictionary[Group, DeviceMesh] = weakref.WeakKeyDictionary()


def mesh_of(ranks: Ranks) -> DeviceMesh:
    """A mesh of these ranks. With a number, a collective over all ranks where it is new."""
    if isinstance(ranks, DeviceMesh):
        return ranks
    world = World.current()
    if isinstance(ranks, Group):
        ranks.require_member("a tensor-parallel layer")
        if ranks.process_group is None:  # a world of one
            return world.mesh(Layout())["tp"]
        if ranks not in _MESHES:
            _MESHES[ranks] = DeviceMesh.from_group(ranks.process_group, world.device.type)
        return _MESHES[ranks]
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1 or world.size % ranks:
        raise LayoutError(
            f"a tensor-parallel layer over {ranks!r}: pass a mesh, a Group, or a number that "
            f"divides the {world.size} rank{'s' * (world.size > 1)} of the world."
        )
    return world.mesh(Layout(dp=world.size // ranks, tp=ranks))["tp"]


class _ParallelLinear(nn.Module):
    """What both layers share: an ``nn.Linear`` of which each rank holds a part."""

    _split_dim: ClassVar[int]
    """The dimension of the weight, (out, in), that is spread over the ranks."""

    def __init__(self, whole: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        mesh = mesh_of(ranks)
        if mesh.ndim != 1:
            raise LayoutError(
                f"a mesh with the dimensions {mesh.mesh_dim_names or mesh.ndim} was given; a "
                "tensor-parallel layer is spread over one. Pass a slice of it, mesh['tp']."
            )
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self._take(whole, mesh)

    def _take(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        self.weight = split_parameter(whole.weight, mesh, self._split_dim)
        self.bias = None if whole.bias is None else self._bias_of(whole.bias, mesh)

    def _bias_of(self, bias: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        """What each rank holds of the bias: it goes with the output features."""
        return split_parameter(bias, mesh, 0) if self._split_dim == 0 else bias

    @classmethod
    def _from(cls, linear: nn.Linear, ranks: Ranks, **options: bool) -> Self:
        mesh = mesh_of(ranks)
        make: Any = cls  # the constructors of both layers differ in one option
        made: Self = make(
            *(linear.in_features, linear.out_features, mesh),
            bias=linear.bias is not None,
            device="meta",
            **options,
        )
        made._take(linear, mesh)
        return made

    def _weight(self) -> DTensor:
        if not isinstance(self.weight, DTensor):
            raise LayoutError(
                f"a tensor-parallel weight of shape {tuple(self.weight.shape)} is a plain tensor: "
                "something replaced it. Load values into it instead, with parameter.copy_()."
            )
        return self.weight


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are spread over the ranks of ``mesh``.

    ``mesh``: a one-dimensional mesh, a ``Group``, or a number of ranks: as many neighbours.
    ``forward(x)`` takes ``x`` whole. With ``gather_output`` the result is whole and plain;
    otherwise it is a DTensor split along its last dimension, for a ``RowParallelLinear``.
    ``from_linear`` splits a layer that every rank holds alike; made new, every rank must have
    seeded torch alike, since the weights drawn are those of ``nn.Linear``.
    """

    _split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Ranks,
        *,
        bias: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), mesh
        )
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: Ranks, *, gather_output: bool = False
    ) -> ColumnParallelLinear:
        """``linear`` split over ``mesh``."""
        return cls._from(linear, mesh, gather_output=gather_output)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        y = split_linear(x, self._weight(), self.bias)
        return gathered(y) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are spread over the ranks of ``mesh``.

    ``mesh``: a one-dimensional mesh, a ``Group``, or a number of ranks: as many neighbours.
    ``forward(x)`` gives the whole result, plain, on every rank; the bias is added once, after the
    sum. ``x`` may be whole or split along its last dimension (a DTensor). With
    ``input_is_parallel`` a plain ``x`` is taken as this rank's part of the input.
    """

    _split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Ranks,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), mesh
        )
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: Ranks, *, input_is_parallel: bool = False
    ) -> RowParallelLinear:
        """``linear`` split over ``mesh``; the bias, which stays whole, is shared with it."""
        return cls._from(linear, mesh, input_is_parallel=input_is_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        weight = self._weight()
        if self.input_is_parallel and not isinstance(x, DTensor):
            shape = torch.Size((*x.shape[:-1], self.in_features))
            x = wrap(x, weight.device_mesh, Shard(x.ndim - 1), shape)
        return split_linear(x, weight, self.bias)


def split_parameter(parameter: Tensor, mesh: DeviceMesh, dim: int, chunks: int = 1) -> nn.Parameter:
    """``parameter``, which all ranks hold alike, as one of which each rank holds a part."""
    local = cut(parameter.detach(), mesh, dim, chunks)
    split = wrap(local, mesh, placement(dim, chunks), parameter.shape)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)
