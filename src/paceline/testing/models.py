"""Small models and data for tests: quick on a CPU, the same on every call.

Making one does not touch torch's global random state.
"""

from __future__ import annotations

import torch
from torch import nn


def make_mlp(
    inputs: int = 8,
    hidden: int = 16,
    outputs: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Two linear layers with a tanh between them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    return model.to(dtype)


def make_resnet(
    channels: int = 8,
    classes: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A small residual network with batch normalisation, for images of any size from 4×4 up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            ResidualBlock(channels, channels),
            ResidualBlock(channels, 2 * channels, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * channels, classes),
        )
    return model.to(dtype)


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        result: torch.Tensor = torch.relu(self.body(images) + self.shortcut(images))
        return result


def make_vectors(
    samples: int,
    inputs: int = 8,
    outputs: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.utils.data.TensorDataset:
    """A dataset of (vector, class) pairs that a linear rule separates, for ``make_mlp``."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    rule = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(vectors.to(dtype), (vectors @ rule).argmax(1))


def make_images(
    samples: int,
    classes: int = 4,
    *,
    size: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.utils.data.TensorDataset:
    """A dataset of (3×size×size image, class) pairs, for ``make_resnet``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    images = torch.randn(samples, 3, size, size, generator=generator, dtype=torch.float64)
    images += labels.view(-1, 1, 1, 1)  # brighter by class: something to learn
    return torch.utils.data.TensorDataset(images.to(dtype), labels)
