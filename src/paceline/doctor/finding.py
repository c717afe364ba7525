"""A finding: what was looked at, how it is, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of the table; ``fix`` is empty only where all is well."""

    check: str
    level: Level
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, fix: str) -> Finding:
    """The run will start, and may be slow or fail later."""
    return Finding(check, "warning", found, fix)


def failed(check: str, found: str, fix: str) -> Finding:
    """The run will not start, or is sure to fail."""
    return Finding(check, "failed", found, fix)


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """What is not well: what failed comes first."""
    found = [finding for finding in findings if finding.level != "ok"]
    return sorted(found, key=lambda finding: finding.level != "failed")


def size(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def seconds(duration: float) -> str:
    """``0.0004`` as ``0.40 ms``."""
    if duration < 1:
        return f"{duration * 1000:.{2 if duration < 0.01 else 0}f} ms"
    return f"{duration:.1f} s"


def rate(bytes_per_second: float) -> str:
    """``1.25e8`` as ``125 MB/s``."""
    unit, value = ("GB/s", 1e9) if bytes_per_second >= 1e9 else ("MB/s", 1e6)
    amount = bytes_per_second / value
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.1f} {unit}"


def counted(number: int, word: str, words: str = "") -> str:
    """``2, "machine"`` as ``2 machines``."""
    return f"{number} {word if number == 1 else words or word + 's'}"
