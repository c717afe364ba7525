"""The parts of benchmarks/wire.py and benchmarks/convergence.py."""
