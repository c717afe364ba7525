"""``paceline train``: start a run, follow it, and say what came of it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from paceline.cli.console import say
from paceline.cli.options import Overrides, SecretFile, ShareGpu, Spread, file_reference

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
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="LIBRARY",
            help="With --script: the library it is written for: torch, horovod or tensorflow.",
        ),
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
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="What starts the ranks: local, ssh, slurm, kubernetes, ray or mpi.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="With --on ssh or mpi: the hosts, like node0:4,node1:4."),
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --on ssh or mpi: a file of hosts.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="With --on: print what would be handed over; start nothing."
        ),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="With --on kubernetes: hand the manifest to kubectl.")
    ] = False,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Go on with the run in this folder; auto: with that in --run-dir, or start it.",
        ),
    ] = None,
    which: Annotated[
        str | None,
        typer.Option(
            metavar="best|last|STEP",
            help="With --resume: go back to this checkpoint; later ones are set aside.",
            show_default=False,
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
        "--on": ("launch.on", _as_yaml(on)),
        "--hosts": (f"launch.{on}.hosts", _as_yaml(_host_list(hosts))),
        "--hostfile": (f"launch.{on}.hostfile", _as_yaml(_absolute(hostfile))),
        "--layout": ("layout", layout),
        "--max-restarts": ("launch.max_restarts", max_restarts),
        "--name": ("name", _as_yaml(name)),
        "--tag": ("tags", _as_yaml(tag or None)),
        "--share-gpu": ("launch.share_gpu", "true" if share_gpu else None),
    }
    typed = {
        "--secret-file": secret_file,
        "--name": name,
        "--tag": " --tag ".join(tag or []),
        "--on": on,
        "--hosts": hosts,
        "--hostfile": hostfile,
    }
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
            dry_run=dry_run,
            apply=apply,
            which=which,
            auto=resume == AUTO,
            backend=backend,
        )
        request.check(layout)
        allocation = None
        if "SLURM_JOB_ID" in os.environ:
            from paceline.cli.train_allocation import place_in_allocation

            allocation = place_in_allocation(request)
        if allocation is not None or request.is_elsewhere():
            from paceline.cli.train_elsewhere import run_elsewhere

            run_elsewhere(request, allocation)
        elif script is None:
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


def _host_list(hosts: str | None) -> list[str] | None:
    return None if hosts is None else [host.strip() for host in hosts.split(",")]


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _as_typed(flag: str, value: str | None) -> str:
    """The words of the command line behind an override."""
    return flag if flag == "--share-gpu" else f"{flag} {value}"


def _split_at_dashes(positionals: list[str]) -> tuple[list[str], list[str]]:
    """Positional arguments before and after ``--``, which the parser has dropped by now."""
    if "--" not in sys.argv:
        return positionals, []
    after = sys.argv[sys.argv.index("--") + 1 :]
    return positionals[: len(positionals) - len(after)], after
