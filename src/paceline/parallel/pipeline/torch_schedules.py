"""The schedules by name (GPipe, 1F1B, zero-bubble) on torch's pipeline stage, adapted.

The orders themselves are torch's; ``paceline/layout/`` has them as tables to check, print and draw.
``PipelineStage`` fixes shapes at its first step and allocates a receive buffer for every microbatch
of a step at once. Here buffers are made when a value is about to arrive and dropped with its
microbatch, so shapes may differ between microbatches and steps, and a stage holds no more than its
schedule says. That overrides methods of torch's stage that are not documented (torch 2.11 to 2.13;
``tests/parallel/test_pipeline_torch.py`` says when they change).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from paceline.parallel.pipeline.split_backward import backward_inputs
from paceline.world import World

Wire = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a value on its way."""

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class LiveForwards:
    """Counts the microbatches whose forward is done and whose backward is not, over all stages."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def add(self) -> None:
        """A forward was done."""
        self.now += 1
        self.most = max(self.most, self.now)


class Stage(PipelineStage):
    """A stage for torch's schedules; ``set_shapes`` before every step."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: ProcessGroup,
        live: LiveForwards,
        *,
        inputs: int,
        outputs: int,
    ) -> None:
        # Metadata of one element: it only says how many values cross, and that they need gradients.
        def examples(number: int) -> tuple[Tensor, ...]:
            return tuple(torch.empty(1, device="meta", requires_grad=True) for _ in range(number))

        super().__init__(
            module,
            index,
            stages,
            device,
            input_args=examples(inputs),
            output_args=examples(max(outputs, 1)),
            group=group,
        )
        self._live = live
        self._incoming: Sequence[Sequence[Wire]] = ()
        self._outgoing: Sequence[Sequence[Wire]] = ()

    def set_shapes(self, incoming: Sequence[Sequence[Wire]], outgoing: Sequence[Any]) -> None:
        """What each microbatch of the next step brings and passes on."""
        self._incoming, self._outgoing = incoming, outgoing

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Make room for a microbatch that is about to arrive."""
        if not self.is_first:
            infos: Any = self.args_recv_info[fwd_chunk_id]
            self._allocate(infos, self._incoming[fwd_chunk_id])
            for info in infos:
                info.buffer.requires_grad_(self.has_backward)  # torch 2.13 would do so itself
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Make room for gradients that are about to arrive."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], self._outgoing[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """What ranks send each other ahead of the first step, to be connected.

        torch 2.11 does so on every backend, and Gloo refuses a message of a rank to itself, which
        neighbouring stages on one rank would be.
        """
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a microbatch forward."""
        with World.current().pulse.during("forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._live.add()
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run a microbatch backward, or the half of it that the stage before waits for."""
        with World.current().pulse.during("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._finish(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the other half."""
        with World.current().pulse.during("backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._finish(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """One backward; the halves of a split one are our own."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):  # as torch does: perform_reduce_grad comes later
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            return backward_inputs(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
            )
        bwd_kwargs["param_groups"].run()
        return (), None

    def _finish(self, chunk: int) -> None:
        self._live.now -= 1
        nothing = torch.empty(0, device=self.device)
        if not self.is_first:
            for info in self.args_recv_info[chunk]:
                info.buffer = nothing
        if not self.is_last:
            for info in self.grad_recv_info[chunk]:
                info.buffer = nothing

    def _allocate(self, infos: Any, wires: Sequence[Wire]) -> None:
        for info, (shape, dtype) in zip(infos, wires, strict=True):
            info.buffer = torch.empty(shape, dtype=dtype, device=self.device)

    # torch compares with the metadata it was given at first; ours is made up, and StageWork checks.
    def _validate_fwd_input(self, *args: Any, **kwargs: Any) -> None: ...

    def _validate_fwd_outputs(self, *args: Any, **kwargs: Any) -> None: ...

    def _validate_stage_tensors(self, *args: Any, **kwargs: Any) -> None: ...


def make_schedule(name: str, stages: list[Stage], microbatches: int) -> Any:
    """torch's schedule ``name`` over this rank's stages; the last stage returns its own loss."""

    def own_loss(output: Tensor, target: Tensor) -> Tensor:
        return output

    if name in _SINGLE:
        return _SINGLE[name](stages[0], microbatches, loss_fn=own_loss, scale_grads=False)
    return _MULTI[name](stages, microbatches, loss_fn=own_loss, scale_grads=False)
