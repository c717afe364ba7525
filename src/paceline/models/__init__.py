"""Reference models that the demo, the recipes and the benchmarks train."""

from paceline.models.gpt import GPT, token_cross_entropy

__all__ = ["GPT", "token_cross_entropy"]
