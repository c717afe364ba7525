"""``paceline config``: show, check and describe configs without starting anything."""

from __future__ import annotations

import typer

from paceline.cli.options import ConfigFile, Overrides

app = typer.Typer(no_args_is_help=True, help="Show, check and describe configs.")


@app.command()
def show(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print a config as it would run.

    Every key is written out, and 'auto' is made explicit.
    """
    from paceline.config import dump, learning_rate, load, resolve

    resolved = resolve(load(config, overrides or ()))
    if resolved.schedule.lr_scaling != "none":
        typer.echo(
            f"# learning rate: {learning_rate(resolved):g} after {resolved.schedule.lr_scaling} "
            f"scaling from batch {resolved.schedule.reference_batch} "
            f"to {resolved.batch.global_batch}"
        )
    typer.echo(dump(resolved), nl=False)


@app.command()
def check(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Say everything that is wrong with a config.

    One line for each problem; the exit status is 2 when there is any.
    """
    from paceline.config import load_checked, resolve, summary

    typer.echo(f"ok: {summary(resolve(load_checked(config, overrides or ())))}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of configs, for editors."""
    import json

    from paceline.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
