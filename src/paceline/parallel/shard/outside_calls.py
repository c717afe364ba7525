"""Calls of a sharded model, or of a part of it, from outside its own step.

For example a discriminator that judges what another engine's model has made, or a teacher that is
called in its student's forward. FSDP gathers what the root holds (the final norm, say) only when
the root itself is called, which for an engine is the loss. So it is gathered here for the length
of such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.nested import tensors
from paceline.parallel.dtensor import cuts
from paceline.parallel.shard.scalars import Scalars
from paceline.torch_internals import after_backward, make_fsdp_root


class OutsideCalls:
    """Watches the modules of ``root`` that cannot run unless the root was called.

    ``is_gathered`` says whether something else gathers it, such as the root's own step.
    """

    def __init__(
        self,
        root: nn.Module,
        parts: Sequence[nn.Module],
        scalars: Scalars,
        is_gathered: Callable[[], bool],
    ) -> None:
        self._root, self._scalars, self._is_gathered = root, scalars, is_gathered
        self._root_runs = False
        self._depth = 0
        self._open = False
        self.had_backward = False
        """Whether such a call has left gradients that no step of this model asked for."""
        root.register_forward_pre_hook(self._enter_root, prepend=True)
        root.register_forward_hook(self._leave_root, always_call=True)
        for part in parts:
            part.register_forward_pre_hook(self._enter, prepend=True)
            part.register_forward_hook(self._leave, always_call=True)

    def end(self) -> None:
        """Free what such a call has gathered, and the gradients it has left there."""
        if self._open:
            self._open = False
            for parameter in self._root.parameters():
                if "shards" not in cuts(parameter):  # gathered
                    parameter.grad = None
            for unit in self._root.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
            self._scalars.stop()

    def _enter_root(self, root: nn.Module, args: Any) -> None:
        self.end()
        self._root_runs = True

    def _leave_root(self, root: nn.Module, args: Any, output: Any) -> None:
        self._root_runs = False

    @property
    def _is_outside_call(self) -> bool:
        return not (self._root_runs or self._is_gathered())

    @torch.compiler.disable
    def _enter(self, part: nn.Module, args: Any) -> None:
        if not self._is_outside_call:
            return
        self._depth += 1
        if not self._open:
            make_fsdp_root(self._root)
            assert isinstance(self._root, FSDPModule)
            self._root.unshard()
            self._scalars.start()
            self._open = True

    @torch.compiler.disable
    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        if not self._is_outside_call or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        results = [t for t in tensors(output, every_field=True) if t.requires_grad]
        if not results or not torch.is_grad_enabled():
            self.end()
        for result in results:  # its backward needs what was gathered
            result.register_hook(self._before_backward)

    def _before_backward(self, grad: Tensor) -> None:
        if self._open:
            self.had_backward = True
            after_backward(self.end)
