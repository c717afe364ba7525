"""``paceline bench wire``: short trials of the wire formats on the user's own model and network."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import (
    ConfigFile,
    Machines,
    MeetingPlace,
    Overrides,
    Patience,
    SecretFile,
    Spread,
    file_reference,
)
from paceline.cli.screen import echo, echo_json

if TYPE_CHECKING:
    from paceline.bench.launching import BenchPlacement
    from paceline.bench.wire_request import WireRequest
    from paceline.config import Config


def wire(
    config: ConfigFile = None,
    nproc: Annotated[
        str | None, typer.Option(metavar="N", help="Ranks on each machine, as for a run.")
    ] = None,
    nnodes: Machines = None,
    rdzv: MeetingPlace = None,
    secret_file: SecretFile = None,
    layout: Spread = None,
    wait: Patience = 60.0,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="What to try: compress.format's values, and local:N (meet every N steps). "
            "Without it, one or two of each kind. none, which is plain, is always tried first.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="After how many steps losses are compared.")
    ] = 100,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", help="How long it may take in all; fewer steps where it must."),
    ] = 300.0,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all numbers as JSON; -: print them, no table."
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Try the formats in which gradients can be sent, on a config's own model, data and machines.

    Each trial starts from the same weights and sees the same data. Ends in a recommendation with
    its numbers, as lines for the config. Nothing is saved.
    """
    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C: the ranks and the files go first
    from paceline.bench.launching import check_outputs, place_of
    from paceline.bench.wire_request import read_wire_request
    from paceline.errors import ConfigError

    given = {
        "launch.nproc": nproc,
        "launch.nnodes": nnodes,
        "launch.rdzv": rdzv,
        "launch.secret": file_reference(secret_file),
        "layout": layout,
    }
    read = _read_config(config, overrides or [], given)
    if problems := check_outputs([("--json", json_file)]):
        raise ConfigError(problems)
    place = place_of(read, wait)
    request = read_wire_request(read, formats=formats, steps=steps, seconds=seconds)
    try:
        _try_formats(place, request, read, json_file)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        raise SystemExit(130) from None


def _read_config(path: str | None, overrides: list[str], given: dict[str, str | None]) -> Config:
    """The config as it would be trained; problems name the flags they come from."""
    from paceline.config import load_checked, resolve, with_code
    from paceline.config.overrides import in_users_words
    from paceline.errors import ConfigError

    flags = {f"{k}={v}": f"--{k.split('.')[-1]} {v}" for k, v in given.items() if v is not None}
    try:
        return with_code(resolve(load_checked(path, [*flags, *overrides], trying_wire=True)))
    except ConfigError as error:
        raise ConfigError(in_users_words(error.problems, flags)) from None


def _try_formats(
    place: BenchPlacement, request: WireRequest, config: Config, json_file: str | None
) -> None:
    from paceline.bench.launching import measure

    def show(found: dict[str, Any]) -> None:
        _show(found, config, json_file)

    found = measure(
        place,
        "paceline.bench.wire_rank",
        request.to_json(),
        asked=request.asked(),
        progress=lambda text: echo(text, err=True, nl=False),
        say=lambda text: echo(text, err=True),
        so_far=show,
    )
    show(found)


def _show(found: dict[str, Any], config: Config, json_file: str | None) -> None:
    import dataclasses
    import json
    from pathlib import Path

    from paceline.bench.comm_report import wide_console
    from paceline.bench.wire_advice import recommend
    from paceline.bench.wire_report import show
    from paceline.bench.wire_result import WireResult

    result = WireResult.from_dict(found)
    advice = recommend(result.trials, result.steps, result.plain_again)
    told = {**found, "advice": None if advice is None else dataclasses.asdict(advice)}
    text = json.dumps(told, indent=2)
    if json_file == "-":
        echo_json(text)
        return
    show(result, config, wide_console())
    if json_file is not None:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
        echo(f"wrote {json_file}", err=True)


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)
