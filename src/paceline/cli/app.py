"""The ``paceline`` command: which commands there are, and how their errors end.

Start-up is kept short by one rule: the file of a command imports nothing but typer at its top,
and what the command needs when it runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.bench import app as bench
from paceline.cli.checkpoint import app as checkpoint
from paceline.cli.config import app as config
from paceline.cli.diagnose import diagnose
from paceline.cli.doctor import doctor
from paceline.cli.evaluate import evaluate
from paceline.cli.init import init
from paceline.cli.predict import predict
from paceline.cli.rendezvous import rendezvous
from paceline.cli.runs import app as runs
from paceline.cli.schedule import schedule
from paceline.cli.screen import echo, pipe_apart, run
from paceline.cli.secret import secret
from paceline.cli.train import train
from paceline.cli.train_usage import TrainCommand
from paceline.cli.verify import verify
from paceline.version import __version__


class _Commands(TyperGroup):
    """All commands. Typer makes status 1 of a closed pipe, which is an answer of some of them."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with pipe_apart():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with pipe_apart():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    # Plain help: rich alone would take as long to import as all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Distributed training for PyTorch: any layout, the same run.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"paceline {__version__}")
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
app.command(name="init")(init)
app.command()(evaluate)
app.command()(predict)
app.command()(verify)
app.command()(rendezvous)
app.command()(secret)
app.command()(schedule)
app.command()(doctor)
app.command()(diagnose)
app.add_typer(runs, name="runs")
app.add_typer(config, name="config")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; errors end as text, not traceback (``paceline.cli.screen``)."""
    run(lambda: app(prog_name="paceline"))
