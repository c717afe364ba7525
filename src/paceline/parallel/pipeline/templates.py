"""What a unit returns, remembered without its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.nested import leaves, map_leaves
from paceline.parallel.pipeline.fake_tensors import Fakes, Spec, is_fake, spec_of

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def template_of(result: Any, given: Any) -> Any:
    """``result`` of a unit that was ``given`` this, with marks in place of its tensors."""
    known = {id(leaf): index for index, leaf in enumerate(leaves(given))}

    def slot_of(leaf: Any) -> Any:
        if isinstance(leaf, _PLAIN):
            return leaf
        if id(leaf) in known:
            return _Slot(None, known[id(leaf)])
        return _Slot(spec_of(leaf), None) if isinstance(leaf, Tensor) else leaf

    return map_leaves(result, slot_of)


class _Slot:
    """A place in what a unit returns: a new tensor, or something it was given."""

    def __init__(self, spec: Spec | None, given: int | None) -> None:
        self.spec, self.given = spec, given


def fill(template: Any, given: Any, fakes: Fakes) -> Any:
    """What a unit returns, with fakes for tensors; ``template`` comes from :func:`template_of`."""
    known = list(leaves(given))

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        if leaf.given is not None:
            return known[leaf.given]
        assert leaf.spec is not None
        return fakes.tensor(leaf.spec)

    return map_leaves(template, make)


def zeros_like(leaf: Any) -> Any:
    """Zeros in place of a fake tensor; anything else as it is."""
    if not is_fake(leaf):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
