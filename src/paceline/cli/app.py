"""The ``paceline`` command: which commands there are, and how their errors end.

Start-up is kept short by one rule: the file of a command imports nothing but typer at its top,
and what the command needs when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import bench, checkpoint, config
from paceline.cli.diagnose import diagnose
from paceline.cli.doctor import doctor
from paceline.cli.rendezvous import rendezvous
from paceline.cli.schedule import schedule
from paceline.cli.train import train
from paceline.cli.verify import verify
from paceline.errors import PacelineError, RankFailed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # Plain help: rich alone would take as long to import as all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Distributed training for PyTorch: any layout, the same run.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command()(train)
app.command()(verify)
app.command()(rendezvous)
app.command()(schedule)
app.command()(doctor)
app.command()(diagnose)
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; errors that Paceline raises on purpose end as text, not traceback."""
    try:
        app(prog_name="paceline")
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(exit_status(error))


def exit_status(error: PacelineError) -> int:
    """2 for a mistake of the user's, the rank's own status for a failed rank, else 1."""
    if isinstance(error, RankFailed):
        # A shell reports a process killed by signal n as 128 + n.
        return 128 - error.exit_code if error.exit_code < 0 else error.exit_code or 1
    return 2 if isinstance(error, ValueError | ImportError) else 1
