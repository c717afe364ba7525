"""Gathering what nvidia-smi reports about the GPUs of this machine."""

from __future__ import annotations

import shutil
import subprocess

from paceline.config import count_gpus
from paceline.doctor.facts import Gpu, Gpus
from paceline.formatting import binary_size

_TIMEOUT_S = 10.0
_MIB = 2**20
# Bits of clocks_event_reasons.active that mean trouble, by NVML's header.
_SLOWED = {
    0x04: "a power cap",
    0x08: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware slowdown)",
    0x80: "the power supply (power brake)",
}
_FIELDS = (
    *("index", "uuid", "name", "memory.total", "memory.free", "driver_version"),
    "ecc.errors.uncorrected.volatile.total",
)
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


def gather_gpus() -> Gpus:
    """The GPUs here; none, and no error, on a machine without NVIDIA's driver."""
    visible = count_gpus()
    if shutil.which("nvidia-smi") is None:
        return Gpus(visible)
    try:
        table = _query("gpu", _FIELDS)
    except (OSError, subprocess.SubprocessError) as error:
        return Gpus(visible, error=f"nvidia-smi failed: {_reason(error)}")
    return Gpus(visible, _driver(table), parse_gpus(table, _slowed(), _users()))


def parse_gpus(
    table: list[list[str]], slowed: dict[str, str], users: list[list[str]]
) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's rows; ``slowed`` by index, ``users`` as rows with the GPU's id."""
    found = []
    for index, uuid, name, total, free, _, errors in table:
        using = tuple(
            f"{pid} {program}" + (f" ({binary_size(int(used) * _MIB)})" if used.isdigit() else "")
            for gpu, pid, program, used in users
            if gpu == uuid
        )
        found.append(
            Gpu(
                int(index),
                name,
                _mib(total),
                _mib(free),
                using,
                int(errors) if errors.isdigit() else None,
                slowed.get(index, ""),
            )
        )
    return tuple(found)


def slowdown(mask: str) -> str:
    """What nvidia-smi's bit mask of clock reasons means in words; empty when nothing is wrong.

    A power cap alone is how a busy GPU works, and no finding.
    """
    try:
        bits = int(mask, 16)
    except ValueError:  # "[N/A]"
        return ""
    words = [text for bit, text in _SLOWED.items() if bits & bit]
    return "" if words == [_SLOWED[0x04]] else ", ".join(words)


def _slowed() -> dict[str, str]:
    for field in _REASONS:  # its name since 2023, and before
        try:
            return {index: slowdown(mask) for index, mask in _query("gpu", ("index", field))}
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
    return {}


def _users() -> list[list[str]]:
    try:
        rows = _query("compute-apps", ("gpu_uuid", "pid", "process_name", "used_memory"))
    except (OSError, subprocess.SubprocessError):
        return []
    return [row for row in rows if len(row) == 4]


def _query(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Rows that nvidia-smi prints for these fields, memory in MiB."""
    done = subprocess.run(
        ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


def _driver(table: list[list[str]]) -> str:
    return table[0][5] if table else ""


def _mib(text: str) -> int:
    return int(text) * _MIB if text.isdigit() else 0


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", "") or getattr(error, "stdout", "") or ""
    return next(iter(str(output).strip().splitlines()), "") or str(error)
