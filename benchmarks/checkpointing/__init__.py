"""What the four checkpoint benchmarks share."""
