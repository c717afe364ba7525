"""ZeRO: parameters, gradients and optimizer state cut over the data-parallel ranks, by FSDP2.

What the stages differ in is when ranks talk. With ``zero=1`` a step gathers each parameter once
and sums gradients once, after the last microbatch. With ``zero=2`` gradients are summed, and kept
as pieces, after every microbatch. With ``zero=3`` parameters too are pieces outside the unit that
is computing. Between steps every rank holds its pieces alone, whatever the stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from paceline.errors import TrainingError
from paceline.nested import map_tensors, tensors
from paceline.options import Sharding
from paceline.parallel.averaging import Averaging, UnitParameter, sparse_embedding
from paceline.parallel.shard.gloo_collectives import ExchangeAndSum, Gather, SumBy
from paceline.parallel.shard.mixed_precision import LOW, cast_inputs, cast_result
from paceline.parallel.shard.outside_calls import OutsideCalls
from paceline.parallel.shard.scalars import Scalars
from paceline.parallel.shard.units import find_units
from paceline.parallel.shard.unused_parameters import HeldParameter, ParameterUsage
from paceline.torch_internals import make_fsdp_root
from paceline.world.group import backend_by_device


def shard(
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    stage: int,
    sharding: Sharding,
    model: nn.Module | None = None,
    units: Sequence[str] | None = None,
    zero_bubble: bool = False,
    averaging: Averaging | None = None,
) -> Sharded:
    """Cut the parameters of ``root`` over the axis ``shards`` of ``mesh``, in place.

    ``root`` is what will be called with each microbatch. ``model`` is the user's model, where that
    is a part of it: names of ``units`` are those in the model, and in low precision its results
    leave in float32, for the loss. Units that ``model`` does not hold are other pipeline stages'.
    Parameters keep their names; they become DTensors, also on the meta device. ``averaging`` sums
    gradients on their way to the ranks that keep them, instead of FSDP.
    """
    model = root if model is None else model
    copies = "copies" in (mesh.mesh_dim_names or ()) and mesh["copies"].size() > 1
    shards = mesh["shards"].size()
    sharding.check(stage, shards, zero_bubble)
    names = find_units(model, sharding.units) if units is None else list(units)
    held = dict(model.named_modules())
    found = [held[name] for name in names if name in held and held[name] is not root]
    _check_can_be_cut(root, [*found, root])
    scalars = Scalars(root, mesh["copies", "shards"] if copies else mesh["shards"])
    parts = [*found, root]
    # Hooks made here run inside FSDP's: after it has gathered, before it lets go.
    if sharding.dtype is not None:
        cast_inputs(model, LOW[sharding.dtype])
        cast_result(model)
    for module in parts:
        module.register_forward_hook(_without_views)
    slots = _slots(parts, scalars)
    usage = None
    if scalars.mesh.size() > 1 and not zero_bubble:
        usage = ParameterUsage(root, slots)
    options: dict[str, Any] = {
        "mesh": scalars.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=LOW[sharding.dtype] if sharding.dtype else None,
            reduce_dtype=torch.float32 if sharding.dtype else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": _offload_policy(sharding, mesh),
        "ignored_params": set(scalars.parameters),
    }
    reshard = sharding.reshard if stage == 3 and not zero_bubble else False
    for module in parts:
        fully_shard(module, reshard_after_forward=_reshard(module, root, reshard), **options)
    sharded = Sharded(root, stage, scalars, usage, model, slots, averaging)
    if model is not root and model in set(root.modules()):  # not a pipeline stage of it
        owners = [slot.owner for slot in slots.get(root, ())]
        sharded.allow_outside_calls(list(dict.fromkeys([model, *found, *owners])))
    return sharded


def _reshard(module: nn.Module, root: nn.Module, asked: bool | int | None) -> bool | int | None:
    if asked is None and module is not root:
        # A head may read the embedding's weight without calling it, once it has run.
        return not isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return asked


def _offload_policy(sharding: Sharding, mesh: DeviceMesh) -> OffloadPolicy:
    if sharding.offload != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


def _slots(parts: Sequence[nn.Module], scalars: Scalars) -> dict[nn.Module, list[HeldParameter]]:
    """Where the parameters lie that each part gathers; inner parts come first, and take theirs."""
    taken = {id(parameter) for parameter in scalars.parameters}
    found: dict[nn.Module, list[HeldParameter]] = {}
    for part in parts:
        held = []
        for owner in part.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if id(parameter) not in taken:
                    taken.add(id(parameter))
                    held.append(HeldParameter(owner, name))
        if held:
            found[part] = held
    return found


def _messages(
    model: nn.Module, slots: Mapping[nn.Module, Sequence[HeldParameter]], averaging: Averaging
) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """How each part sums the gradients of its trained parameters by ``averaging``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for number, (part, held) in enumerate(slots.items()):
        parameters = [slot.parameter for slot in held if slot.parameter.requires_grad]
        unit = [UnitParameter(names[id(p)], tuple(p.shape)) for p in parameters]
        found[part] = averaging.scatter(unit, number)
    return found


def _without_views(unit: nn.Module, args: Any, output: Any) -> Any:
    """Results that are views of others, as plain tensors on the same memory.

    FSDP hangs its gathering for backward on a unit's results. From a view it would fall off as
    soon as the model changes it in place, as ``nn.ReLU(inplace=True)`` does.
    """
    if not torch.is_grad_enabled() or all(
        t._base is None for t in tensors(output, every_field=True)
    ):
        return None
    return map_tensors(
        output, lambda t: _Alias.apply(t) if t.requires_grad and t._base is not None else t
    )


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _check_can_be_cut(root: nn.Module, units: Sequence[nn.Module]) -> None:
    if (name := sparse_embedding(root)) is not None:
        raise TrainingError(
            f"zero: {name!r} is an embedding with sparse=True, whose gradients cannot be cut. "
            "Build it with sparse=False, or use zero=0."
        )
    seen: set[int] = set()
    for unit in units:
        dtypes: dict[torch.dtype, str] = {}
        for name, parameter in unit.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not parameter.is_contiguous():  # channels_last, say: FSDP takes plain ones alone
                parameter.data = parameter.data.contiguous()
            if parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, name)
        if len(dtypes) > 1:
            both = " and ".join(f"{name} ({dtype})" for dtype, name in dtypes.items())
            raise TrainingError(
                f"zero: the parameters {both} would be summed in one message, which takes one "
                "dtype. Cast the model to one dtype, or make one of their modules a unit of its "
                "own with Sharding(units=...)."
            )


class Sharded:
    """A module that ``shard`` has cut: says when its ranks talk, and finishes gradients."""

    def __init__(
        self,
        root: nn.Module,
        stage: int,
        scalars: Scalars,
        usage: ParameterUsage | None,
        model: nn.Module,
        slots: Mapping[nn.Module, Sequence[HeldParameter]],
        averaging: Averaging | None,
    ) -> None:
        assert isinstance(root, FSDPModule)
        self.root, self.stage = root, stage
        self.mesh = scalars.mesh
        self._scalars = scalars
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._usage = usage
        self._model, self._slots, self._averaging = model, slots, averaging
        self._outside_calls: OutsideCalls | None = None
        self._in_step = self._is_gathered = False
        on_cpu = self.mesh.device_type == "cpu" and self.mesh.size() > 1
        if on_cpu and backend_by_device(self.mesh.get_group(0)).get("cpu") == "gloo":
            for unit in self._units:
                unit.set_custom_reduce_scatter(ExchangeAndSum())  # type: ignore[arg-type]
                unit.set_custom_all_gather(Gather())  # type: ignore[arg-type]
        self._sum_by_averaging()

    def _sum_by_averaging(self) -> None:
        if self._averaging is None or self.mesh.size() == 1:
            return
        for part, message in _messages(self._model, self._slots, self._averaging).items():
            assert isinstance(part, FSDPModule)
            part.set_custom_reduce_scatter(SumBy(message))  # type: ignore[arg-type]

    def allow_outside_calls(self, parts: Sequence[nn.Module]) -> None:
        """Let these modules be called while no step of the root is under way, too."""
        self._outside_calls = OutsideCalls(
            self.root, parts, self._scalars, lambda: self._in_step or self._is_gathered
        )

    @torch.no_grad()
    def follow_freezing(self) -> None:
        """Train the parameters that require a gradient now, and no others. A collective."""
        self.let_go()
        inner = [unit for unit in self._units if unit is not self.root]
        _check_can_be_cut(self.root, [*inner, self.root])
        self._sum_by_averaging()
        make_fsdp_root(self.root)
        for unit in self._units:
            unit.unshard()  # which looks anew at what is trained; there is no other part to that
            unit.reshard()

    def let_go(self) -> None:
        """Keep this rank's pieces alone: a forward without a backward leaves more gathered."""
        if self._outside_calls is not None:
            self._outside_calls.end()
        for unit in self._units:
            unit.reshard()

    def communicate(self, *, last: bool, counts: bool = True) -> None:
        """Call before each microbatch's forward; ``last`` says whether it ends the step.

        A microbatch that does not count (a placeholder) uses no parameter, whatever it touches.
        """
        if not self._in_step:
            self._forget_outside_calls()
            self._in_step = True
        root: FSDPModule = self.root
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or self.stage == 3)
        root.set_requires_gradient_sync(last or self.stage > 1)
        if self.mesh.ndim == 2 and self.stage > 1:
            # Copies exchange sums of a whole step: what a microbatch adds stays with its copy.
            root.set_requires_all_reduce(last)
        if self._usage is not None:
            self._usage.begin(counts)

    @torch.no_grad()
    def finish(self) -> None:
        """Call after the last backward of a step, before looking at gradients. A collective."""
        self._in_step = False
        flags = [] if self._usage is None else self._usage.take()
        flags += self._scalars.used()
        if self.mesh.size() > 1 and flags:
            flags = self._anywhere(flags)
        if self._usage is not None:
            for slot, used in zip(self._usage.slots, flags, strict=False):
                if not used:
                    slot.parameter.grad = None
            flags = flags[len(self._usage.slots) :]
        self._scalars.finish(flags)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget a step that failed half way: its gradients, and what it left gathered."""
        self._in_step = False
        gathered = [] if self._usage is None else self._usage.forget()
        gathered += self.root.parameters()
        make_fsdp_root(self.root)  # what failed may have been the first step, before its root ran
        if hasattr(self.root, "reset_iter_state"):  # torch 2.13
            self.root.reset_iter_state()
        for unit in self._units:
            unit.reshard()
        self._scalars.stop()
        for parameter in (*gathered, *self.root.parameters()):
            parameter.grad = None

    def _forget_outside_calls(self) -> None:
        """What outside calls have used, and the gradients they left, are no part of this step."""
        if self._outside_calls is None:
            return
        self._outside_calls.end()
        if self._outside_calls.had_backward:
            self._outside_calls.had_backward = False
            gathered = [] if self._usage is None else self._usage.forget()
            for parameter in (*gathered, *self.root.parameters()):
                parameter.grad = None

    def _anywhere(self, flags: list[bool]) -> list[bool]:
        """Which flags are set on any rank."""
        groups = self._groups()
        device = "cpu" if "cpu" in backend_by_device(groups[0]) else self.mesh.device_type
        found = torch.tensor(flags, dtype=torch.uint8, device=device)
        for group in groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return [bool(flag) for flag in found.tolist()]

    def _groups(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole parameters in place, to call any part of the model. A collective."""
        self._is_gathered = True
        for unit in self._units:
            unit.unshard()
        try:
            with self._scalars.in_place():
                yield
        finally:
            self._is_gathered = False
            for unit in self._units:
                unit.reshard()
