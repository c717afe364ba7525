"""Gradients in fewer bytes: formats, the exchange with its residuals, and DDP's hook."""
