"""``paceline verify``: prove that layouts compute what one process computes."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ConfigFile, Overrides
from paceline.cli.screen import echo, echo_json

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.prove import VerifyReport


def verify(
    config: ConfigFile = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="A layout to prove, like dp=2,zero=3,microbatch=4, tp=2,sequence=1 or "
            "pp=2,schedule=zbv. May be repeated.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.")] = 3,
    global_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Samples per step; else the config's, at most 32.", show_default=False
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="fp64|run", help="float64, or the run's own precision.")
    ] = "fp64",
    overrides: Overrides = None,
    plant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Introduce this known bug, to see it caught."),
    ] = None,
    list_plants: Annotated[
        bool, typer.Option("--list-plants", help="List the bugs that --plant knows, and exit.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="The longest that one run may take.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove that layouts compute what one process computes, for the model of a config.

    A few steps on one process and on local ranks, every loss, gradient, norm, parameter and buffer
    compared. The exit status is 0 when all are the same, 1 when one differs, fails or is refused,
    2 for a mistake.
    """
    if list_plants:
        _list_plants()
        return
    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C: the ranks and the files go first
    try:
        report = _prove(
            config, layouts or [], overrides or [], plant, steps, global_batch, precision, timeout
        )
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        raise SystemExit(130) from None
    if as_json:
        echo_json(report.to_json())
    else:
        from paceline.track.console import SafeConsole

        report.show(SafeConsole())
    if not report.ok:
        raise SystemExit(1)


def _prove(
    path: str | None,
    layouts: list[str],
    overrides: list[str],
    plant: str | None,
    steps: int,
    global_batch: int | None,
    precision: str,
    timeout: float,
) -> VerifyReport:
    import paceline.config
    from paceline.errors import ConfigError

    if not layouts:
        raise ConfigError("no layout to verify: name at least one, like --layout dp=2")
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g}: must be a number of seconds above 0")
    config = _on_own_ranks(paceline.config.load(path, overrides))
    if problems := paceline.config.check(config.model_copy(update={"compile": False})):
        raise ConfigError(problems)
    from paceline.prove import verify_config

    return verify_config(
        paceline.config.with_code(config),
        layouts,
        steps=steps,
        global_batch=global_batch,
        precision=precision,
        plant=plant,
        timeout=timeout,
    )


def _on_own_ranks(config: Config) -> Config:
    """The proof runs on CPU ranks of its own, whatever the run will run on."""
    launch = config.launch.model_copy(update={"nproc": 1, "device": "cpu"})
    data = config.data.model_copy(update={"pin_memory": None})
    return config.model_copy(update={"layout": "auto", "launch": launch, "data": data})


def _list_plants() -> None:
    from paceline.prove._planted import PLANTS

    for plant in PLANTS.values():
        echo(f"{plant.name:20} {plant.words}")


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)
