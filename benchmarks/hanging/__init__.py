"""Hangs on purpose, for benchmarks/hangs.py."""
