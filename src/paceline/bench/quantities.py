"""Sizes, times and rates: read from a command line, and written for people."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_POWER = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text: str) -> int:
    """``64K``, ``1.5M`` or ``4096`` as bytes; a K is 1,024. Raises ``ValueError`` for others."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or K, M or G of them, like 64K")
    size = float(match[1]) * 2 ** _POWER[match[2].upper()]
    if size < 1 or size != int(size):
        raise ValueError(f"{text!r} is {size:g} bytes; a size is a whole number of them above 0")
    return int(size)


def show_size(size: float) -> str:
    """``65536`` as ``64 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5 or unit == "GiB":
            break
        size /= 1024
    return f"{plain_number(size)} {unit}"


def show_time(seconds: float) -> str:
    """``0.00012`` as ``120 µs``."""
    if seconds < 1e-3:
        return f"{plain_number(seconds * 1e6)} µs"
    return f"{plain_number(seconds * 1e3)} ms" if seconds < 1 else f"{plain_number(seconds)} s"


def show_rate(rate: float) -> str:
    """Bytes a second, ``1.25e7``, as ``12.5 MB/s``."""
    if rate < 1e6:
        return f"{plain_number(rate / 1e3)} kB/s"
    return f"{plain_number(rate / 1e6)} MB/s" if rate < 1e9 else f"{plain_number(rate / 1e9)} GB/s"


def plain_number(value: float) -> str:
    """Three digits that count, never in powers of ten: ``1234``, ``12.3``, ``0.0123``."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) < 1e-6:
        return "0"
    text = f"{value:.3g}"
    if "e" in text:
        text = f"{value:.8f}".rstrip("0")
    return text
