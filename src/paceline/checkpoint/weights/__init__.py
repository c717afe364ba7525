"""Weights for other programs, and from them."""
