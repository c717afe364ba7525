"""What a series of measurements says about a wire: a latency and a bandwidth. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyFit:
    """``seconds = latency + bytes / bandwidth``, and how far from it the measurements lie.

    ``off`` is the largest deviation, as a share of what was measured.
    """

    latency: float
    bandwidth: float
    off: float

    def seconds(self, size: float) -> float:
        """How long ``size`` bytes take."""
        return self.latency + size / self.bandwidth


def fit(points: Sequence[tuple[int, float]]) -> LatencyFit | None:
    """The line through ``(bytes, seconds)`` with the least relative errors.

    Relative, as the smallest size would otherwise count for nothing beside the largest. ``None``
    when there are fewer than two sizes, or when more bytes do not take longer.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        return None
    # Least squares of (a + s c - t) / t over a (the latency) and c (seconds per byte).
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_time = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (s - mean_size) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    together = sum(
        w * (s - mean_size) * (t - mean_time) for w, (s, t) in zip(weights, points, strict=True)
    )
    slope = together / spread
    latency = mean_time - slope * mean_size
    if latency < 0:  # no call is faster than nothing: the best line through the origin
        latency = 0.0
        slope = sum(s / t for s, t in points) / sum((s / t) ** 2 for s, t in points)
    if slope <= 0:
        return None
    off = max(abs(latency + slope * s - t) / t for s, t in points)
    return LatencyFit(latency, 1 / slope, off)


def predict(points: Sequence[tuple[int, float]], size: int) -> float | None:
    """About how long ``size`` will take, from ``(bytes, seconds)`` of smaller ones; or unknown."""
    if not points:
        return None
    (before, earlier), (last, seconds) = points[-2:] if len(points) > 1 else ((0, 0.0), points[0])
    if last <= before:
        return None
    return seconds + max(0.0, (seconds - earlier) / (last - before)) * (size - last)
