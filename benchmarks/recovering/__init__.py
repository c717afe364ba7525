"""The parts of benchmarks/recovery.py."""
