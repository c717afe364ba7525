"""Saving by all ranks at once and loading at any layout, on torch.distributed.checkpoint."""
