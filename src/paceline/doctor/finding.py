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
