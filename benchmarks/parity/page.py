"""The two parts of docs/parity.md: proofs on CPU ranks, and below them those over NCCL."""

from __future__ import annotations

from pathlib import Path

HEADING = "## Over NCCL"


def write_cpu_part(path: Path, text: str) -> None:
    """Replace all but the part over NCCL."""
    path.write_text(_joined(text, _split(path)[1]), encoding="utf-8")


def write_nccl_part(path: Path, text: str) -> None:
    """Replace the part over NCCL, which begins with ``HEADING``."""
    path.write_text(_joined(_split(path)[0], text), encoding="utf-8")


def _split(path: Path) -> tuple[str, str]:
    before, heading, after = path.read_text(encoding="utf-8").partition(HEADING)
    return before, heading + after


def _joined(first: str, second: str) -> str:
    return f"{first.rstrip()}\n\n{second.strip()}".rstrip() + "\n"
