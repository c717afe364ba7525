"""Arguments that several commands share."""

from __future__ import annotations

import os
from typing import Annotated

import typer

ConfigFile = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML, JSON or Python config; without one, the demo.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a config value, like --set train.steps=100. May be repeated.",
        show_default=False,
    ),
]
Spread = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="How work is spread, like dp=2,zero=3 or tp=2.",
        show_default=False,
    ),
]
Machines = Annotated[
    str | None,
    typer.Option(metavar="N", help="How many machines; start the same command on each."),
]
MeetingPlace = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where they meet: one of the machines.")
]
SecretFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The secret that the machines share; make it with: paceline secret FILE",
    ),
]
Ema = Annotated[
    bool, typer.Option("--ema", help="The averaged weights of the checkpoint (ema: in its config).")
]
ShareGpu = Annotated[
    bool,
    typer.Option(
        "--share-gpu",
        help="For tests: more ranks than GPUs share them over NCCL. Slow.",
        show_default=False,
    ),
]
Patience = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long to wait for the other machines.")
]


def file_reference(secret_file: str | None) -> str | None:
    """What ``--secret-file FILE`` stands for in a config: its ``launch.secret``."""
    path = None if secret_file is None else os.path.abspath(os.path.expanduser(secret_file))
    return None if path is None else f"file:{path}"
