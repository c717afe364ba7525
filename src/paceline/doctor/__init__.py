"""Preflight: what would go wrong with a run, found before it is launched."""
