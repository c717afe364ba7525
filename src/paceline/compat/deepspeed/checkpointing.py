"""``deepspeed.checkpointing``: a function whose activations are computed again in the backward."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

_configured = False


def checkpoint(function: Any, *args: Any) -> Any:
    """``function(*args)``; what it keeps for the backward is computed again there."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing to set: activations are recomputed where they were, and kept nowhere."""
    global _configured
    _configured = True


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _configured


def reset() -> None:
    """Forget that ``configure`` was called."""
    global _configured
    _configured = False
