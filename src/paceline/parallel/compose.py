"""Which ways of spreading a model apply, and in what order: the one place that says so."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.parallel.replicate import replicate


def check_supported(layout: Layout) -> None:
    """Refuse a layout that names an axis this version cannot train."""
    for axis, value in layout.beyond_dp.items():
        raise LayoutError(
            f"layout {str(layout)!r}: {axis}={value} is not available in this version, which "
            f"trains data-parallel layouts (dp=N). Leave {axis} out."
        )


def spread(module: nn.Module, layout: Layout, device: torch.device) -> nn.Module:
    """``module`` spread over the world as ``layout`` says; unchanged on a single rank."""
    check_supported(layout)
    return replicate(module, device) if layout.dp > 1 else module
