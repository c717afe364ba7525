"""Taking the randomness out of a forward pass, and noticing what is left of it.

With ``randomness='fast'`` dropout draws from each rank's own stream: a layout cannot draw what one
process draws, and no comparison could tell a bug from another mask. So it is switched off in every
run of the prover. Random numbers that do not know the layout stay on.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS: set[Any] = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
}
_ATTENTION = F.scaled_dot_product_attention
_PLACE_OF_DROPOUT_P = 4


class NoDropout(TorchFunctionMode):
    """While it is on, dropout passes its input through; ``met`` says whether there was any."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", 1))
            self.met |= bool(p) and bool(training)
            return args[0] if args else kwargs["input"]
        if func is _ATTENTION:
            positional = len(args) > _PLACE_OF_DROPOUT_P
            p = args[_PLACE_OF_DROPOUT_P] if positional else kwargs.get("dropout_p", 0.0)
            self.met |= bool(p)
            if positional:
                place = _PLACE_OF_DROPOUT_P
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)

    def silence(self, model: nn.Module) -> None:
        """Switch off the dropout of modules that apply it out of sight of Python."""
        for module in model.modules():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout:
                self.met = True
                module.dropout = 0.0


def random_state() -> tuple[Any, ...]:
    """Where this process's random streams stand; equal before and after: nothing was drawn."""
    state: tuple[Any, ...] = (torch.get_rng_state().numpy().tobytes(), random.getstate())
    if torch.cuda.is_initialized():
        state += (torch.cuda.get_rng_state().numpy().tobytes(),)
    try:
        import numpy as np
    except ImportError:
        return state
    kind, keys, *rest = np.random.get_state()
    return (*state, kind, keys.tobytes() if hasattr(keys, "tobytes") else keys, *rest)
