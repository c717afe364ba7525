"""``paceline secret``: make the secret that the machines of a run share."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.screen import echo


def secret(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new file.", show_default=False)],
) -> None:
    """Make a secret for the machines of a run, in a file that only you can read.

    Copy it to every machine (scp -p keeps it yours alone) and give each of them --secret-file
    FILE: then only they can take part in the run, and what they send each other to meet is
    encrypted.
    """
    from paceline.launch.secret import make_secret

    make_secret(file)
    echo(f"{file} made; copy it to every machine: paceline train … --secret-file {file}")
