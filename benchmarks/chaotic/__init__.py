"""The parts of benchmarks/chaos.py."""
