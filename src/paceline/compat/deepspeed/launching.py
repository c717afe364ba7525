"""What a script does before ``initialize``: its arguments, and joining the other ranks."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from paceline.world import World


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="For scripts that ask for it.")
    group.add_argument("--deepspeed_config", type=str, default=None, help="Path of ds_config.json.")
    return parser


def init_distributed(dist_backend: str | None = None, timeout: Any = None, **_: Any) -> None:
    """Join the ranks that the launcher started; ``initialize`` does it by itself."""
    seconds = None if timeout is None else getattr(timeout, "total_seconds", lambda: timeout)()
    backend = dist_backend if dist_backend in ("gloo", "nccl") else "auto"
    World.init(backend=backend, timeout=seconds)
