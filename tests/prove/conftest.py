from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing import RankPool

_MODELS = ("gpt2", "llama", "qwen3", "bert")


@pytest.fixture(scope="session")
def hugging_face_pool() -> Iterator[RankPool]:
    """Ranks that share one import of the library, which takes seconds."""
    preload = [f"transformers.models.{name}.modeling_{name}" for name in _MODELS]
    parts = ["paceline.prove", "paceline.parallel.tensor", "paceline.models.gpt"]
    with RankPool(preload=[*parts, *preload], timeout=120) as pool:
        yield pool
