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
from paceline.cli.console import give_up, open_standard_streams, say
from paceline.cli.diagnose import diagnose
from paceline.cli.doctor import doctor
from paceline.cli.rendezvous import rendezvous
from paceline.cli.schedule import schedule
from paceline.cli.secret import secret
from paceline.cli.train import train
from paceline.cli.train_usage import TrainCommand
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


app.command(cls=TrainCommand)(train)
app.command()(verify)
app.command()(rendezvous)
app.command()(secret)
app.command()(schedule)
app.command()(doctor)
app.command()(diagnose)
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; errors that Paceline raises on purpose end as text, not traceback.

    So does what the system refuses: a full disk, a folder without rights, a name too long.
    """
    open_standard_streams()
    try:
        app(prog_name="paceline")
    except PacelineError as error:
        say(str(error), error=True)
        sys.exit(exit_status(error))
    except OSError as error:
        give_up_on_full_console()
        say(f"paceline: {_refused(error)}", error=True)
        sys.exit(1)


def give_up_on_full_console() -> None:
    """Where standard output takes nothing, its rest must not end the process a second time."""
    try:
        sys.stdout.flush()
    except OSError:
        give_up(sys.stdout)


def _refused(error: OSError) -> str:
    """What the system refused, and for which file, in one sentence."""
    why = error.strerror or str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names)}: {why}." if names else f"{why}."


def exit_status(error: PacelineError) -> int:
    """2 for a mistake of the user's, the rank's own status for a failed rank, else 1."""
    if isinstance(error, RankFailed):
        # A shell reports a process killed by signal n as 128 + n.
        return 128 - error.exit_code if error.exit_code < 0 else error.exit_code or 1
    return 2 if isinstance(error, ValueError | ImportError) else 1
