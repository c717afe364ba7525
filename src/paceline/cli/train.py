"""``paceline train``: start a run, follow it, and say what came of it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.cli.console import say
from paceline.cli.options import PLACES, Overrides, SecretFile, ShareGpu, Spread, file_reference

AUTO = "auto"
"""``--resume auto``; a folder of that name is ``--resume ./auto``."""


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="A YAML, JSON or Python config; without one, the demo. With --script, what "
            "follows -- goes to the script.",
            show_default=False,
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Run this torchrun-style script instead of a config."),
    ] = None,
    nproc: Annotated[
        str | None, typer.Option(metavar="N", help="How many ranks; else one per GPU, or 2.")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many machines, or least:most; start the same command on each of them.",
        ),
    ] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where they meet; further ones after commas stand in."
        ),
    ] = None,
    secret_file: SecretFile = None,
    layout: Spread = None,
    on: Annotated[
        str, typer.Option(metavar="PLACE", help=f"Where the ranks run: {', '.join(PLACES)}.")
    ] = PLACES[0],
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Go on with the run in this folder; auto: with that in --run-dir, or start it.",
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The run's own folder, which must be new; or a pattern of {name}, {date} and "
            "{time}, like 'runs/{name}-{date}'.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run and of its folder.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="A word by which paceline runs finds the run. May be repeated.",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How often failed ranks are started again; by default 3, for a script 0.",
        ),
    ] = None,
    share_gpu: ShareGpu = False,
) -> None:
    """Train what a config describes, or run a script on several ranks.

    With nothing at all: a small byte-level GPT on the source of Python's standard library.
    """
    config, script_arguments = _split_at_dashes(arguments or [])
    flags = {
        "--nproc": ("launch.nproc", nproc),
        "--nnodes": ("launch.nnodes", nnodes),
        "--rdzv": ("launch.rdzv", rdzv),
        "--secret-file": ("launch.secret", file_reference(secret_file)),
        "--layout": ("layout", layout),
        "--max-restarts": ("launch.max_restarts", max_restarts),
        "--name": ("name", _as_yaml(name)),
        "--tag": ("tags", _as_yaml(tag or None)),
        "--share-gpu": ("launch.share_gpu", "true" if share_gpu else None),
    }
    typed = {"--secret-file": secret_file, "--name": name, "--tag": " --tag ".join(tag or [])}
    try:
        from paceline.cli.train_request import TrainRequest

        request = TrainRequest(
            configs=config,
            script=script,
            script_arguments=script_arguments,
            flags={
                f"{k}={v}": _as_typed(flag, typed.get(flag, v))
                for flag, (k, v) in flags.items()
                if v is not None
            },
            overrides=list(overrides or []),
            resume=None if resume == AUTO else resume,
            run_dir=run_dir,
            auto=resume == AUTO,
        )
        request.check(on, layout)
        if script is None:
            from paceline.cli.train_config import run_config

            run_config(request)
        else:
            from paceline.cli.train_script import run_script

            run_script(request)
    except KeyboardInterrupt:
        # Click would make "Aborted!" and status 1 of it.
        say("interrupted before the ranks were started", error=True)
        raise SystemExit(130) from None


def _as_yaml(value: str | list[str] | None) -> str | None:
    """Words as the value of an override: those that look like a number stay words."""
    import json

    return None if value is None else json.dumps(value)


def _as_typed(flag: str, value: str | None) -> str:
    """The words of the command line behind an override."""
    return flag if flag == "--share-gpu" else f"{flag} {value}"


def _split_at_dashes(positionals: list[str]) -> tuple[list[str], list[str]]:
    """Positional arguments before and after ``--``, which the parser has dropped by now."""
    if "--" not in sys.argv:
        return positionals, []
    after = sys.argv[sys.argv.index("--") + 1 :]
    return positionals[: len(positionals) - len(after)], after
