"""``deepspeed.ops.adam``: torch's Adam with DeepSpeed's arguments and defaults.

Whether its state lies on the CPU is said by ``zero_optimization.offload_optimizer``, not by the
class: both names are the same optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Adam

from paceline.errors import TrainingError


class FusedAdam(Adam):
    """AdamW, or Adam with ``adam_w_mode=False``; no weight decay unless it is given."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, amsgrad)
        super().__init__(
            params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adam_w_mode
        )


class DeepSpeedCPUAdam(Adam):
    """As ``FusedAdam``, with the arguments in the order that DeepSpeed has for this one."""

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, amsgrad)
        super().__init__(
            model_params,
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            decoupled_weight_decay=adamw_mode,
        )


def _check(name: str, bias_correction: bool, amsgrad: bool) -> None:
    if not bias_correction or amsgrad:
        wrong = "amsgrad=True" if amsgrad else "bias_correction=False"
        raise TrainingError(f"{name}({wrong}) is not supported. Leave it out.")
