"""``paceline config``: show, check and describe configs without starting anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import ConfigFile, Overrides, Spread
from paceline.cli.screen import echo, echo_json

if TYPE_CHECKING:
    from paceline.config import Config

app = typer.Typer(no_args_is_help=True, help="Show, check and describe configs.")


@app.command()
def show(config: ConfigFile = None, layout: Spread = None, overrides: Overrides = None) -> None:
    """Print a config as it would run.

    Every key is written out, and 'auto' is made explicit.
    """
    from paceline.config import became, dump, learning_rate, load, resolve

    resolved = resolve(_read(load, config, layout, overrides or []))
    for line in became(resolved):
        echo(f"# deepspeed: {line}")
    if resolved.schedule.lr_scaling != "none":
        echo(
            f"# learning rate: {learning_rate(resolved):g} after {resolved.schedule.lr_scaling} "
            f"scaling from batch {resolved.schedule.reference_batch} "
            f"to {resolved.batch.global_batch}"
        )
    echo(dump(resolved), nl=False)


@app.command()
def check(config: ConfigFile = None, layout: Spread = None, overrides: Overrides = None) -> None:
    """Say everything that is wrong with a config.

    One line for each problem; the exit status is 2 when there is any.
    """
    from paceline.config import config_notes, load_checked, resolve, summary

    checked = _read(load_checked, config, layout, overrides or [])
    for note in config_notes(checked):
        echo(note, err=True)
    echo(f"ok: {summary(resolve(checked))}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of configs, for editors."""
    import json

    from paceline.config import json_schema

    echo_json(json.dumps(json_schema(), indent=2))


def _read(
    read: Callable[..., Config], config: str | None, layout: str | None, overrides: list[str]
) -> Config:
    """The config with everything laid over it; problems name the flag they come from."""
    from paceline.config.overrides import in_users_words
    from paceline.errors import ConfigError

    flags = {} if layout is None else {f"layout={layout}": f"--layout {layout}"}
    try:
        return read(config, [*flags, *overrides])
    except ConfigError as error:
        raise ConfigError(in_users_words(error.problems, flags)) from None
