"""``hvd.DistributedOptimizer``: the user's optimizer, with gradients reduced over ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.compat.horovod.torch.compression import Compression
from paceline.compat.horovod.torch.gradient_reducer import BackwardCounter, GradientReducer, named
from paceline.compat.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    ProcessSet,
    allreduce_async_,
    global_process_set,
    size,
    synchronize,
)

_NOT_SKIPPED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, made to reduce gradients over all ranks before it applies them.

    The result is of a subclass of the optimizer's own class, with the same parameter groups and
    state. The reduction of a gradient starts in the backward pass, as soon as it is computed;
    ``step()`` waits for all of them. To change reduced gradients, call ``synchronize()``, change
    them, and step in ``with optimizer.skip_synchronize():``.

    ``backward_passes_per_step`` adds up gradients of so many passes before they are reduced.
    ``groups`` reduces gradients together: that many groups, or lists of parameters. With
    ``op=Adasum`` it is the change of the parameters that is reduced, not the gradients.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    names = named(optimizer.param_groups, named_parameters)
    if op == Adasum and size() > 1:
        if process_set != global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        made = _made_into(_adasum_class(type(optimizer)), optimizer)
        made._begin(names, compression, backward_passes_per_step)
        return made
    made = _made_into(_reducing_class(type(optimizer)), optimizer)
    made._begin(
        GradientReducer(
            optimizer.param_groups,
            names,
            compression=compression,
            passes=backward_passes_per_step,
            op=op,
            predivide=gradient_predivide_factor,
            together=groups or None,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    )
    return made


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or isinstance(groups, bool) or groups < 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor."
            )
        return
    seen: set[int] = set()
    for param in (param for group in groups for param in group):
        if not isinstance(param, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(param) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(param))


def _made_into(cls: type[Any], optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer of ``cls`` with everything that ``optimizer`` has.

    Its ``__init__`` is not called again: it may need arguments that nobody knows by now. A
    scheduler made before has put a ``step`` of its own into the optimizer, which stays there.
    """
    made = object.__new__(cls)
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    return made


def _named_like(cls: type[Any], base: type[Any]) -> type[Any]:
    cls.__name__ = cls.__qualname__ = base.__name__
    return cls


def _reducing_class(base: type[Any]) -> type[Any]:
    """A subclass of ``base`` that reduces gradients before each step."""

    class Reducing(base):
        def _begin(self, reducer: GradientReducer) -> None:
            self._reducer = reducer
            self._synchronized = False
            self._should_synchronize = True

        op = property(lambda self: self._reducer.op)
        process_set = property(lambda self: self._reducer.process_set)
        backward_passes_per_step = property(lambda self: self._reducer.counter.passes)
        _parameter_names = property(lambda self: self._reducer.counter.names)
        _handles = property(lambda self: self._reducer.handles)

        def synchronize(self) -> None:
            """Wait until every gradient is the reduced one."""
            self._reducer.synchronize()
            self._synchronized = True

        @contextlib.contextmanager
        def skip_synchronize(self) -> Iterator[None]:
            """Steps in this block take gradients as they are: ``synchronize()`` was called."""
            self._should_synchronize = False
            try:
                yield
            finally:
                self._should_synchronize = True

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Add up gradients of ``passes`` passes before they are reduced, from now on."""
            self._reducer.counter.passes = passes
            self._reducer.counter.reset()

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Wait for the reduced gradients and apply them."""
            if not self._should_synchronize:
                self._synchronized = False
                return super().step(closure)
            if closure is not None:
                return super().step(self._reducing(closure))
            if self._synchronized:
                warnings.warn(_NOT_SKIPPED, stacklevel=2)
            self.synchronize()
            self._synchronized = False
            return super().step()

        def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
            """The closure, after which gradients are reduced: the step applies them at once."""

            def reduced() -> Any:
                loss = closure()
                self._reducer.synchronize()
                return loss

            return reduced

        def zero_grad(self, *args: Any, **options: Any) -> None:
            """Clear gradients; an error while they are on their way."""
            self._reducer.counter.check_may_zero()
            super().zero_grad(*args, **options)

        def load_state_dict(self, *args: Any, **options: Any) -> None:
            """Load a state; what was being reduced is forgotten."""
            self._reducer.forget()
            self._synchronized = False
            super().load_state_dict(*args, **options)

    return _named_like(Reducing, base)


def _adasum_class(base: type[Any]) -> type[Any]:
    """A subclass of ``base`` that steps by itself, and combines all ranks' steps by Adasum."""

    class AdasumSteps(base):
        op = Adasum

        def _begin(self, names: dict[torch.Tensor, str], compression: Any, passes: int) -> None:
            self._compression = compression
            self._counter = BackwardCounter(passes, names, lambda param: None)
            self._counter.watch(self.param_groups)

        backward_passes_per_step = property(lambda self: self._counter.passes)
        _parameter_names = property(lambda self: self._counter.names)

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Add up gradients of ``passes`` passes before a step, from now on."""
            self._counter.passes = passes
            self._counter.reset()

        def synchronize(self) -> None:
            """Nothing to wait for: it is steps that are combined, by ``step()``."""

        @contextlib.contextmanager
        def skip_synchronize(self) -> Iterator[None]:
            """Not possible with Adasum."""
            raise AssertionError(
                "Skipping synchronization is not supported when using Adasum optimizer."
            )
            yield

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Step on this rank's gradients, and apply what the steps of all ranks combine to."""
            loss = None if closure is None else closure()
            self._counter.watch(self.param_groups)
            before = {param: param.detach().clone() for param in self._counter.params}
            super().step()
            sent = {}
            for param, start in before.items():
                change, context = self._compression.compress(param.detach() - start)
                name = self._counter.names[param]
                sent[param] = (allreduce_async_(change, name=name, op=Adasum), context)
            for param, (handle, context) in sent.items():
                change = self._compression.decompress(synchronize(handle), context)
                with torch.no_grad():
                    param.copy_(before[param] + change)
            self._counter.reset()
            return loss

        def zero_grad(self, *args: Any, **options: Any) -> None:
            """Clear gradients; an error between a backward pass and its step."""
            self._counter.check_may_zero()
            super().zero_grad(*args, **options)

        def load_state_dict(self, *args: Any, **options: Any) -> None:
            """Load a state; passes are counted anew."""
            self._counter.reset()
            super().load_state_dict(*args, **options)

    return _named_like(AdasumSteps, base)
