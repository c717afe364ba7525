"""The parts of ``nccl_matrix.py``: many cases in one world, and what they are."""
