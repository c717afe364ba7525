"""Reducing gradients over ranks while the backward pass goes on: the inside of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.compat.horovod.torch.functions import broadcast_object
from paceline.compat.horovod.torch.mpi_ops import (
    Average,
    ProcessSet,
    allreduce_async_,
    grouped_allreduce_async_,
    size,
    sparse_allreduce_async,
    synchronize,
)

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
_ZEROED_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)


def named(
    groups: Sequence[dict[str, Any]], named_parameters: Iterable[Any] | None
) -> dict[torch.Tensor, str]:
    """The name of every parameter of an optimizer, checked to be complete and unique."""
    if named_parameters is None:
        return {
            param: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(groups)
            for j, param in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(twice)}"
        )
    known = {id(param) for _, param in pairs}
    missing = [id(p) for group in groups for p in group["params"] if id(p) not in known]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(map(str, missing))}"
        )
    return {param: name for name, param in sorted(pairs, key=lambda pair: str(pair[0]))}


class BackwardCounter:
    """Counts the backward passes of each parameter, and calls back when all of them are done."""

    def __init__(
        self, passes: int, names: dict[torch.Tensor, str], on_done: Callable[[torch.Tensor], None]
    ) -> None:
        self.names = names
        self.passes = passes
        self._left: dict[torch.Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._on_done = on_done

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters that are watched, in the order in which they were found."""
        return list(self._left)

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass has run since the last ``reset``."""
        return any(left != self.passes for left in self._left.values())

    def watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Watch all parameters that take gradients by now; those that are watched stay so."""
        for i, group in enumerate(groups):
            for j, param in enumerate(group["params"]):
                if param.requires_grad and param not in self._left:
                    self.names.setdefault(param, f"allreduce.noname.{i}.{j}")
                    self._left[param] = self.passes
                    self._hooks.append(param.register_post_accumulate_grad_hook(self._count))

    def reset(self) -> None:
        """Begin to count anew."""
        self._left = dict.fromkeys(self._left, self.passes)

    def _count(self, param: torch.Tensor) -> None:
        if self._left[param] <= 0:
            raise AssertionError(_TOO_MANY_PASSES)
        self._left[param] -= 1
        if self._left[param] == 0:
            self._on_done(param)

    def check_may_zero(self) -> None:
        """Refuse to clear gradients that may be on their way."""
        if self.has_begun:
            raise AssertionError(_ZEROED_TOO_EARLY)


class GradientReducer:
    """Starts the reduction of each gradient when it is there, and waits for all of them."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        names: dict[torch.Tensor, str],
        *,
        compression: Any,
        passes: int,
        op: Any,
        predivide: float,
        together: int | list[Any] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._groups = groups
        self._compression = compression
        self.op = op
        self._factors = {"prescale_factor": 1.0, "postscale_factor": 1.0}
        if op == Average:
            self._factors = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide}
        self._sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.counter = BackwardCounter(passes, names, self._is_done)
        self._bundles: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
        self._waiting: dict[tuple[torch.Tensor, ...], int] = {}
        self.handles: dict[tuple[torch.Tensor, ...], list[tuple[Any, Any]]] = {}
        self.is_active = process_set.included() and size() > 1
        if self.is_active:
            self.counter.watch(groups)
            if together is not None:
                self._bundle(together)

    def synchronize(self) -> None:
        """Reduce what is not on its way yet, and wait until every gradient is the reduced one."""
        if not self.is_active:
            return
        self.counter.watch(self._groups)
        for param in self.counter.params:
            bundle = self._bundles.get(param, (param,))
            if bundle not in self.handles:
                self._start(bundle)
        for bundle, started in self.handles.items():
            self._finish(bundle, started)
        self.forget()

    def forget(self) -> None:
        """Begin anew, as after a step."""
        self.handles.clear()
        self._waiting = {bundle: len(bundle) for bundle in self._waiting}
        self.counter.reset()

    def _bundle(self, together: int | list[Any]) -> None:
        """Which gradients travel in one operation; the order of parameters is rank 0's."""
        watched = self.counter.params
        own = [self.counter.names[param] for param in watched]
        root = self.process_set.ranks[0] if self.process_set.ranks else 0
        order = broadcast_object(own, root, "gradient_groups", self.process_set)
        watched.sort(key=lambda param: order.index(self.counter.names[param]))
        bundles: list[list[torch.Tensor]]
        if isinstance(together, list):
            among = {id(param) for param in watched}
            bundles = [[p for p in group if id(p) in among] for group in together]
            named_there = {id(param) for bundle in bundles for param in bundle}
            bundles += [[param] for param in watched if id(param) not in named_there]
        else:
            share, more = divmod(len(watched), together)
            rest = iter(watched)
            bundles = [
                [next(rest) for _ in range(share + (number < more))] for number in range(together)
            ]
        for bundle in filter(None, map(tuple, bundles)):
            self._bundles.update(dict.fromkeys(bundle, bundle))
            self._waiting[bundle] = len(bundle)

    def _is_done(self, param: torch.Tensor) -> None:
        bundle = self._bundles.get(param, (param,))
        if bundle in self._waiting:
            self._waiting[bundle] -= 1
            if self._waiting[bundle] > 0:
                return
        self._start(bundle)

    def _start(self, bundle: tuple[torch.Tensor, ...]) -> None:
        """Send the gradients; zeros for those that only other ranks may have computed."""
        dense: list[torch.Tensor] = []
        sparse: list[torch.Tensor] = []
        for param in bundle:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            is_sparse = param.grad.is_sparse and not self._sparse_as_dense
            (sparse if is_sparse else dense).append(param)
        started: dict[torch.Tensor, tuple[Any, Any]] = {}
        for param in sparse:
            assert param.grad is not None
            handle = sparse_allreduce_async(
                param.grad, self.counter.names[param], self.op, self.process_set
            )
            started[param] = (handle, None)
        if dense:
            started.update(self._start_dense(dense, is_bundle=len(bundle) > 1))
        self.handles[bundle] = [started[param] for param in bundle]

    def _start_dense(
        self, params: list[torch.Tensor], *, is_bundle: bool
    ) -> dict[torch.Tensor, tuple[Any, Any]]:
        sent, contexts = [], []
        for param in params:
            assert param.grad is not None
            gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
            tensor, context = self._compression.compress(gradient)
            sent.append(tensor)
            contexts.append(context)
        options = {"op": self.op, "process_set": self.process_set, **self._factors}
        name = self.counter.names[params[0]]
        if not is_bundle:
            return {params[0]: (allreduce_async_(sent[0], name=name, **options), contexts[0])}
        handle = grouped_allreduce_async_(sent, name=name, **options)
        result: list[Any] = []

        def part(index: int) -> Callable[[], torch.Tensor]:
            def wait() -> torch.Tensor:
                if not result:
                    result.extend(synchronize(handle))
                return result[index]

            return wait

        return {param: (part(i), contexts[i]) for i, param in enumerate(params)}

    def _finish(self, bundle: tuple[torch.Tensor, ...], started: list[tuple[Any, Any]]) -> None:
        for param, (handle, context) in zip(bundle, started, strict=True):
            output = handle() if callable(handle) else synchronize(handle)
            assert param.grad is not None
            if not output.is_sparse:
                output = self._compression.decompress(output, context)
            if param.grad.is_sparse:
                param.grad = (
                    output if output.is_sparse else output.to_sparse(param.grad.sparse_dim())
                )
            elif output is not param.grad:
                param.grad.copy_(output)
