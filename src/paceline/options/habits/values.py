"""What other libraries call a choice: ``precision="16-mixed"`` is ``"fp16"``."""

from __future__ import annotations

from typing import Any

SAME_VALUE = {
    "float32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "no": "fp32",
    "torch.float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "torch.float16": "fp16",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "torch.bfloat16": "bf16",
    "float64": "fp64",
    "double": "fp64",
    "64": "fp64",
    "64-true": "fp64",
    "torch.float64": "fp64",
    "gpu": "cuda",
    "cosine_annealing": "cosine",
    "constant_with_warmup": "constant",
}
"""By what others write, the choice that is meant."""


def value_meant(value: Any) -> str | None:
    """The choice that is meant by ``value``, in any spelling; ``None`` where nobody can say."""
    return SAME_VALUE.get(str(value).strip().lower())
