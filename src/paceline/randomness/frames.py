"""Which module is running: a stack of frames that hooks on the model's modules keep.

A draw is known by its module's name in the whole model, by the number of the module's call and by
its own number in that call. Names do not change with the layout, and numbers start anew with each
microbatch, so a stage of a pipeline, a recomputed block and a compiled one count alike.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.randomness.keys import signed, words
from paceline.torch_internals import around_compiled_call, set_shared_hooks

_SITE = "_paceline_random_site"
_KEY, _LABEL = "_paceline_random_key", "_paceline_random_label"
_MAY_DRAW = (nn.RNNBase, nn.MultiheadAttention, nn.RReLU, nn.FractionalMaxPool2d)


class Site(NamedTuple):
    """A module in the whole model."""

    name: str
    words: tuple[int, ...]
    kind: str
    time_first: bool
    """Whether it says that its samples are in the second dimension (``batch_first=False``)."""


class Frame:
    """One call of a module. ``path`` is 0 unless a module is called again within its parent."""

    def __init__(self, module: nn.Module, path: int) -> None:
        self.site: Site = getattr(module, _SITE)
        self.key: Tensor = getattr(module, _KEY)
        self.path = path
        self.draws = 0
        self.calls: dict[str, int] = {}
        """How often each module has been called from here."""

    def copied(self) -> Frame:
        """As it is now, to go on from later."""
        made = copy.copy(self)
        made.calls = dict(self.calls)
        return made


class Frames:
    """The modules that are running, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []

    def entered(self, module: nn.Module) -> None:
        """A module's forward begins."""
        self.stack.append(Frame(module, self.number(module)))

    def number(self, module: nn.Module) -> int:
        """Count a call of ``module``; the number makes it differ from earlier calls."""
        if not self.stack:
            return 0
        parent, label = self.stack[-1], getattr(module, _LABEL)
        earlier = parent.calls.get(label, 0)
        parent.calls[label] = earlier + 1
        return parent.path * 31 + earlier

    def left(self, module: nn.Module) -> None:
        """A module's forward has ended; those inside it that raised have as well."""
        if torch.compiler.is_compiling():
            self.stack.pop()
            return
        while self.stack:
            if self.stack.pop().key is getattr(module, _KEY):
                return


RUNNING = Frames()
"""The modules that are running in this process. The backward of a GPU, which may recompute some of
them in a thread of its own, has the caller wait for it."""


def watch(named: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Have the modules report to ``RUNNING``, under these names in the whole model."""
    for name, module in named:
        own = words(2, "module", name)
        site = Site(name, own, type(module).__name__, _is_time_first(module))
        setattr(module, _SITE, site)
        setattr(module, _LABEL, name.rpartition(".")[2])
        # A tensor, so that blocks which differ in their names alone share compiled code.
        setattr(module, _KEY, torch.tensor(own, dtype=torch.int32, device=device))
        if around_compiled_call(module, functools.partial(_around, module)) or _cannot_draw(module):
            continue
        set_shared_hooks(module, _entering, _leaving)


def _is_time_first(module: nn.Module) -> bool:
    """Whether it says so, or a layer in it: the attention of a ``TransformerEncoderLayer``."""
    both = (module, *module.children())
    return any(getattr(one, "batch_first", None) is False for one in both)


def _entering(module: nn.Module, args: Any) -> None:
    RUNNING.entered(module)


def _leaving(module: nn.Module, args: Any, output: Any) -> None:
    RUNNING.left(module)


def _around(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        RUNNING.entered(module)
        try:
            return compiled(*args, **kwargs)
        finally:
            RUNNING.left(module)

    return call


def is_watched(module: nn.Module) -> bool:
    """Whether ``watch`` knows it."""
    return hasattr(module, _SITE)


def _cannot_draw(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers that draws nothing: hooks would cost and not help."""
    own = type(module).__module__.startswith("torch.nn.modules")
    draws = isinstance(module, _MAY_DRAW) or "Dropout" in type(module).__name__
    return own and not draws and next(module.children(), None) is None


def key_of(frame: Frame, number: int) -> tuple[Tensor | int, Tensor | int]:
    """Both key words of draw ``number`` in a frame: numbers, or tensors in compiled code."""
    first = _mixed(frame.path * 0x9E3779B1 + number * 0x85EBCA77 + 0x165667B1)
    second = _mixed(first + 0xC2B2AE3D)
    if torch.compiler.is_compiling():
        return frame.key[0] + signed(first), frame.key[1] ^ signed(second)
    own = frame.site.words
    return signed(own[0] + first), signed(own[1] ^ second)


def _mixed(value: int) -> int:
    value &= 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return value ^ (value >> 15)
