from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.prove.prover import PRELOAD
from paceline.testing import RankPool

_MODELS = ("gpt2", "llama", "qwen3", "bert")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Ranks that share one import of all that proofs need, which takes seconds."""
    models = [f"transformers.models.{name}.modeling_{name}" for name in _MODELS]
    with RankPool(preload=[*PRELOAD, "paceline.models.gpt", *models], timeout=120) as pool:
        yield pool
