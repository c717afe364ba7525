"""``paceline verify``: prove that layouts compute what one process computes."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ConfigFile, Overrides, ShareGpu
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
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda", help="Where to prove it; auto: where the run would train."
        ),
    ] = "auto",
    share_gpu: ShareGpu = False,
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
            config,
            layouts or [],
            overrides or [],
            steps=steps,
            global_batch=global_batch,
            precision=precision,
            plant=plant,
            device=device,
            share_gpu=share_gpu,
            timeout=timeout,
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
    *,
    precision: str,
    timeout: float,
    **asked: Any,
) -> VerifyReport:
    """The report of ``verify_config``, which ``asked`` are arguments of."""
    import paceline.config
    from paceline.errors import ConfigError

    if not layouts:
        raise ConfigError("no layout to verify: name at least one, like --layout dp=2")
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g}: must be a number of seconds above 0")
    config = paceline.config.load(path, overrides)
    if problems := paceline.config.check(_on_own_ranks(config, compiled=precision == "run")):
        raise ConfigError(problems)
    from paceline.prove import verify_config

    return verify_config(
        paceline.config.with_code(config), layouts, precision=precision, timeout=timeout, **asked
    )


def _on_own_ranks(config: Config, *, compiled: bool) -> Config:
    """The config to check: the proof runs on ranks of its own, whatever the run will run on."""
    own = {"nproc": 1, "device": "cpu", "share_gpu": False}
    return config.model_copy(
        update={
            "layout": "auto",
            "launch": config.launch.model_copy(update=own),
            "data": config.data.model_copy(update={"pin_memory": None}),
            "compile": config.compile and compiled,
        }
    )


def _list_plants() -> None:
    from paceline.prove._planted import PLANTS

    for plant in PLANTS.values():
        echo(f"{plant.name:20} {plant.words}")


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)
