"""Random streams: one per rank and library, derived from one seed, saved and restored exactly."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from paceline.errors import WorldError

_ARRAY = "array of"


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch (CPU and CUDA), ``random`` and numpy (if imported) for one rank.

    Streams of different (seed, rank) pairs are unrelated: the seeds are hashes, so that seed 0 on
    rank 1 is not seed 1 on rank 0. The same pair always gives the same streams.
    """
    for name, value in (("seed", seed), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise WorldError(f"{name}={value!r} must be a whole number, 0 or more.")
    torch.manual_seed(_derive(seed, rank, "torch"))  # every CUDA device too, now or when it wakes
    random.seed(_derive(seed, rank, "python"))
    if (numpy := sys.modules.get("numpy")) is not None:
        # numpy's global generator takes 32-bit words.
        word = _derive(seed, rank, "numpy")
        numpy.random.seed([word & 0xFFFFFFFF, word >> 32])


def rng_state() -> dict[str, Any]:
    """The state of every stream ``seed_everything`` seeds, for ``set_rng_state``.

    Tensors, numbers and strings only: it loads with ``torch.load(weights_only=True)``. On CUDA it
    is the state of the current device.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every stream back to where ``rng_state`` saw it.

    A stream that ``state`` does not hold (numpy was not imported, there was no GPU) is left alone.
    """
    if not isinstance(state, dict) or not {"torch", "python"} <= state.keys():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise WorldError(f"this is not a state made by rng_state(): it holds {found}.")
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_arrays(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _derive(seed: int, rank: int, stream: str) -> int:
    """63 well-mixed bits."""
    digest = hashlib.sha256(f"paceline seed={seed} rank={rank} {stream}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _plain(value: Any) -> Any:
    """numpy's state with each array as its type and numbers, which load without executing code."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return {_ARRAY: str(value.dtype), "values": value.tolist()}
    return value


def _arrays(value: Any) -> Any:
    import numpy

    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return numpy.array(value["values"], dtype=value[_ARRAY])
    return {key: _arrays(inner) for key, inner in value.items()}
