"""Activation checkpointing: forget what a block computed, and compute it again for the backward.

Memory for time. The block stays the module it was: its path, its parameters' names and its hooks
(FSDP's among them, which stay outside and so gather parameters once) are not touched; only its
``forward`` goes through torch's non-reentrant checkpoint.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import TrainingError
from paceline.options import Recompute
from paceline.options.recompute import BlockRule
from paceline.parallel.blocks import find_blocks
from paceline.parallel.selective_recompute import resolve, selective_contexts
from paceline.parallel.shard.units import matches

Context = Callable[[], contextlib.AbstractContextManager[Any]]

_MARK = "_paceline_recomputed"
_EARLIER = "_paceline_forward"


def recompute(
    model: nn.Module, mode: Recompute | str | int | None, *, context: Context | None = None
) -> list[str]:
    """Let the blocks of ``model`` forget and recompute; gives their names. In place.

    ``context`` opens what a forward pass runs in (number format, tensor parallelism): the
    recomputation runs in the backward pass, where nothing of it is left. Asking again replaces
    what was asked before; ``None`` takes it off.
    """
    for module in model.modules():
        _restore(module)
    if mode is None:
        return []
    wanted = Recompute.of(mode)
    keep = resolve(wanted.keep) if wanted.mode == "selective" else None
    names = _blocks(model, wanted.blocks)[:: wanted.every]
    for name in names:
        _replace(model.get_submodule(name), keep, context or contextlib.nullcontext)
    return names


def _replace(block: nn.Module, keep: frozenset[Any] | None, context: Context) -> None:
    if "forward" in vars(block):  # somebody replaced it before us: theirs goes inside ours
        setattr(block, _EARLIER, vars(block)["forward"])
    changing = _ChangingBuffers()

    @functools.wraps(type(block).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = vars(self).get(_EARLIER) or functools.partial(type(self).forward, self)
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        args, kwargs = _without_caches(args, kwargs)
        return _checkpointed(self, inner, args, kwargs, keep, context, changing)

    # A bound method, not a closure over the block: a deep copy of the model gets its own.
    block.forward = types.MethodType(forward, block)
    setattr(block, _MARK, True)


def _restore(block: nn.Module) -> None:
    if vars(block).pop(_MARK, False):
        earlier = vars(block).pop(_EARLIER, None)
        del block.forward
        if earlier is not None:
            block.forward = earlier


def _checkpointed(
    block: nn.Module,
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: frozenset[Any] | None,
    context: Context,
    changing: _ChangingBuffers,
) -> Any:
    # Tensors go by position, keyword arguments too: checkpoint looks nowhere else for the devices
    # whose random state it has to keep.
    names = list(kwargs)

    def run(*values: Any) -> Any:
        named = dict(zip(names, values[len(args) :], strict=True))
        return inner(*values[: len(args)], **named)

    values = (*args, *kwargs.values())
    if torch.compiler.is_compiling():
        # The compiler traces the forward once, in its context, and recomputes within its graph.
        if keep is None:
            return checkpoint(run, *values, use_reentrant=False)
        contexts: Any = functools.partial(selective_contexts, keep)
        return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)
    before = changing.remember(block)

    def contexts_of_both_passes() -> tuple[Any, Any]:
        first, again = (
            selective_contexts(keep)
            if keep is not None
            else (contextlib.nullcontext(), contextlib.nullcontext())
        )
        return first, _Recomputation(block, context, again, before)

    output = checkpoint(run, *values, use_reentrant=False, context_fn=contexts_of_both_passes)
    changing.learn(block, before)
    return output


class _Recomputation(contextlib.AbstractContextManager[None]):
    """What the second pass runs in: the forward's context, and the buffers as they were then."""

    def __init__(
        self,
        block: nn.Module,
        context: Context,
        cached: contextlib.AbstractContextManager[Any],
        before: dict[str, Tensor],
    ) -> None:
        self._block, self._context, self._cached, self._before = block, context, cached, before
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_with_buffers(self._block, self._before))
            stack.enter_context(self._context())
            stack.enter_context(self._cached)
            self._open.append(stack.pop_all())

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            error.add_note(
                f"This happened while {type(self._block).__name__} was recomputed for the backward "
                "pass. Its forward must compute the same again, and with mode='selective' nothing "
                "may change a kept result in place (set inplace=False) and there may be one "
                "backward only. Leave such blocks out by blocks=, or use mode='full'."
            )
        self._open.pop().__exit__(kind, error, traceback)


class _ChangingBuffers:
    """Which buffers of a block its forward changes: running statistics, a power iteration's vector.

    The recomputation has to start from what they were before the forward, and must not change
    them again. Which they are is seen in the first forward; only those are copied from then on.
    """

    def __init__(self) -> None:
        self._names: set[str] | None = None

    def remember(self, block: nn.Module) -> dict[str, Tensor]:
        """Copies of the buffers that change, or of all while that is not known."""
        norms = {
            f"{path}.{name}" if path else name
            for path, module in block.named_modules()
            if module.training and hasattr(module, "running_mean")
            for name, _ in module.named_buffers(recurse=False)
        }
        return {
            name: buffer.detach().clone()
            for name, buffer in block.named_buffers()
            if self._names is None or name in self._names or name in norms
        }

    def learn(self, block: nn.Module, before: dict[str, Tensor]) -> None:
        """Compare with what the forward left, the first time; forget the copies of the rest."""
        if self._names is None:
            now = dict(block.named_buffers())
            self._names = {name for name, old in before.items() if not _same(old, now.get(name))}
            for name in before.keys() - self._names:
                del before[name]


def _same(old: Tensor, new: Tensor | None) -> bool:
    return new is not None and old.dtype == new.dtype and torch.equal(old, new)


@contextlib.contextmanager
def _with_buffers(block: nn.Module, before: dict[str, Tensor]) -> Iterator[None]:
    """``block`` with copies of ``before`` in place of its buffers of these names."""
    own = {}
    for name, value in before.items():
        path, _, last = name.rpartition(".")
        module = block.get_submodule(path)
        own[name] = (module, last, getattr(module, last))
        setattr(module, last, value.clone())
    try:
        yield
    finally:
        for module, last, buffer in own.values():
            setattr(module, last, buffer)


def _without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with Hugging Face's key-value caches left out: a second pass would add to them.

    In training nothing reads them; transformers' own checkpointing leaves them out as well.
    """
    cache_utils = sys.modules.get("transformers.cache_utils")
    if cache_utils is None:
        return args, kwargs
    caches = [isinstance(value, cache_utils.Cache) for value in (*args, *kwargs.values())]
    if not any(caches):
        return args, kwargs
    args = tuple(None if c else v for c, v in zip(caches, args, strict=False))
    named = zip(caches[len(args) :], kwargs.items(), strict=True)
    kwargs = {name: None if c else v for c, (name, v) in named}
    return args, kwargs | ({"use_cache": False} if kwargs.get("use_cache") else {})


def _blocks(model: nn.Module, rule: BlockRule | None) -> list[str]:
    if rule is None:
        found = find_blocks(model) or _children_of_a_sequential(model)
        if not found:
            raise TrainingError(
                f"recompute: {type(model).__name__} has no repeated blocks and is no Sequential. "
                "Name the modules to recompute, like Recompute(blocks='encoder.*'); there are "
                f"{', '.join(name for name, _ in model.named_children()) or 'none inside it'}."
            )
        return found
    named = {name: module for name, module in model.named_modules() if name}
    if callable(rule):
        found = [name for name, module in named.items() if rule(name, module)]
        if not found:
            raise TrainingError("recompute: the function given as blocks chooses no module.")
    else:
        found = []
        for pattern in [rule] if isinstance(rule, str) else rule:
            matched = [name for name in named if matches(name, pattern)]
            if not matched:
                near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
                raise TrainingError(
                    f"recompute: blocks={pattern!r} matches no module. Near names: "
                    f"{', '.join(near)}. '*' stands for one part of a name, '**' for any number."
                )
            found += [name for name in matched if name not in found]
    for name in found:
        if isinstance(named[name], nn.ModuleList | nn.ModuleDict):
            raise TrainingError(
                f"recompute: {name!r} is a {type(named[name]).__name__}, which has no forward of "
                f"its own. Name its children, as in '{name}.*'."
            )
    return found


def _children_of_a_sequential(model: nn.Module) -> list[str]:
    """Those with parameters: one without would keep its input and save nothing."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential) and len(module) > 1:
            return [
                f"{path}.{key}" if path else key
                for key, child in module.named_children()
                if next(child.parameters(), None) is not None
            ]
    return []
