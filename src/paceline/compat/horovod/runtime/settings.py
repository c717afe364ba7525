"""Horovod's environment variables that this runtime follows."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.errors import ConfigError

_MIB = 1024 * 1024


@dataclass(frozen=True)
class HorovodSettings:
    """Read once, by ``hvd.init()``."""

    fusion_bytes: int = 64 * _MIB
    """``HOROVOD_FUSION_THRESHOLD``: reductions are put together up to this size; 0: never."""
    cycle_seconds: float = 0.001
    """``HOROVOD_CYCLE_TIME`` (milliseconds): how long a reduction waits for others to fuse with."""
    stall_check: bool = True
    """Off by ``HOROVOD_STALL_CHECK_DISABLE=1``."""
    stall_warning_seconds: float = 60.0
    """``HOROVOD_STALL_CHECK_TIME_SECONDS``"""
    stall_shutdown_seconds: float = 0.0
    """``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``; 0: never."""


def read_settings() -> HorovodSettings:
    """The settings of this process's environment; a value that is no number is refused."""
    return HorovodSettings(
        fusion_bytes=int(_number("HOROVOD_FUSION_THRESHOLD", 64 * _MIB)),
        cycle_seconds=_number("HOROVOD_CYCLE_TIME", 1.0) / 1000,
        stall_check=not is_set("HOROVOD_STALL_CHECK_DISABLE"),
        stall_warning_seconds=_number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown_seconds=_number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
    )


def is_set(name: str) -> bool:
    """Whether a switch of Horovod's is on: any value but 0 and the empty one."""
    return os.environ.get(name, "0").strip().lower() not in ("", "0", "false")


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"{name}={text!r} must be a number from 0 on. Unset it for {default:g}.")
    return value
