"""``paceline init``: a small project that trains at once."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.screen import echo

TEMPLATES = {
    "tabular": "classify rows of numbers",
    "image": "classify images",
    "text": "a causal language model on text files",
}


def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The project's folder.")],
    template: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="; ".join(f"{name}: {about}" for name, about in TEMPLATES.items()) + ".",
        ),
    ] = "tabular",
) -> None:
    """Write a small project: a config, a model, data and a test.

    It trains as it is, with data that needs no download. Nothing that is there is written over.
    """
    import re
    import shlex
    from pathlib import Path

    from paceline.errors import ConfigError

    if template not in TEMPLATES:
        raise ConfigError(f"--template {template}: there are {', '.join(TEMPLATES)}.")
    target = Path(folder)
    source = Path(__file__).parent / "templates" / template
    files = {file.name.removesuffix(".txt"): file for file in sorted(source.iterdir())}
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{folder!r} is a file. Name a folder.")
    if taken := [name for name in files if (target / name).exists()]:
        raise ConfigError(
            f"{folder!r} already holds {', '.join(taken)}, and nothing is written over. Name "
            "another folder."
        )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", target.absolute().name).strip("-._") or "project"
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file_name, file in files.items():
            text = file.read_text(encoding="utf-8").replace("{name}", name[:100])
            (target / file_name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder!r} cannot be written: {error.strerror or error}.") from None
    for file_name in files:
        echo(f"  {target / file_name}")
    echo(f"\nTrain it: paceline train {shlex.quote(str(target / 'config.yaml'))}")
