"""``paceline doctor``: what would go wrong with a run, found before it is launched."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer

from paceline.cli.options import (
    ConfigFile,
    MeetingPlace,
    Overrides,
    Patience,
    SecretFile,
    file_reference,
)
from paceline.cli.screen import echo, echo_json


def doctor(
    config: ConfigFile = None,
    nproc: Annotated[
        str | None, typer.Option(metavar="N", help="How many ranks each machine will run.")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many machines, or least:most. Start the same command on each of them.",
        ),
    ] = None,
    rdzv: MeetingPlace = None,
    secret_file: SecretFile = None,
    wait: Patience = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Check this machine, or several together, for what would go wrong with a run.

    Network, folders, disk, memory, limits, versions, speed, GPUs and the config itself; each
    finding comes with its fix. The exit status is 1 when something failed, 2 for a mistake in the
    command.
    """
    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C: helper processes and files go first
    given = {"nproc": nproc, "nnodes": nnodes, "rdzv": rdzv}
    flags = {
        f"launch.{name}={value}": f"--{name} {value}"
        for name, value in given.items()
        if value is not None
    }
    if secret_file is not None:
        named = f"launch.secret={file_reference(secret_file)}"
        flags[named] = f"--secret-file {secret_file}"
    try:
        sound = _examine(config, overrides or [], flags, wait, as_json)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        raise SystemExit(130) from None
    if not sound:
        raise SystemExit(1)


def _examine(
    config: str | None, overrides: list[str], flags: dict[str, str], wait: float, as_json: bool
) -> bool:
    from paceline.doctor.checks import run_checks
    from paceline.doctor.examine import examine
    from paceline.doctor.own_machine import DoctorRequest
    from paceline.doctor.report import is_sound, show, to_json
    from paceline.errors import ConfigError

    if not wait > 0:
        raise ConfigError(f"--wait {wait:g}: must be a number of seconds above 0")
    facts = examine(
        DoctorRequest(config, overrides, wait, flags, say=lambda text: echo(text, err=True))
    )
    findings = run_checks(facts)
    if as_json:
        echo_json(to_json(findings, facts))
    else:
        from paceline.track.console import SafeConsole

        show(findings, SafeConsole())
    return is_sound(findings)


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)
