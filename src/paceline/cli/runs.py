"""``paceline runs``: which runs there are, how one of them is, its output, its end."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.screen import echo

_COLUMNS = ("run", "state", "layout", "step", "loss", "age", "tags")
STATES = ("running", "finished", "failed", "interrupted")


class _Runs(TyperGroup):
    """``paceline runs FOLDER`` is ``paceline runs list FOLDER``."""

    default = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Runs,
    rich_markup_mode=None,
    help="List runs; and ask for one run's state or output, or end it, whatever engine has it.\n\n"
    "paceline runs FOLDER is short for paceline runs list FOLDER.",
)
Run = Annotated[str, typer.Argument(metavar="RUN", help="The folder of the run.")]


@app.command(name="list")
def list_runs(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER",
            help="Where to look, subfolders included; by default runs/.",
            show_default=False,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="Only runs with this tag; repeated: with all of them.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only runs of this name, like 'gpt-*'."),
    ] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help=f"Only runs that are {', '.join(STATES)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs with their state, layout, step, loss and age, latest first.

    A run is running while its launcher lives; finished; failed; or interrupted, which is also what
    a run is that was killed.
    """
    import fnmatch

    from paceline.cli.checkpoint_screen import show_json, show_table
    from paceline.cli.run_list import find_runs
    from paceline.errors import ConfigError

    if state is not None and state not in STATES:
        raise ConfigError(f"--state {state}: must be one of {', '.join(STATES)}.")
    found = [
        run
        for run in find_runs(folders or ["runs"])
        if set(tag or ()) <= set(run.tags)
        and (name is None or fnmatch.fnmatchcase(run.name, name))
        and (state is None or run.state == state)
    ]
    if as_json:
        show_json([run.to_json() for run in found])
        return
    if not found:
        which = "no such runs" if tag or name or state else "no runs"
        where = ", ".join(f"{folder.rstrip('/')}/" for folder in folders or ["runs"])
        echo(f"{which} in {where}", err=True)
        return
    show_table(_COLUMNS, [run.row() for run in found])


@app.command()
def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """How a run is: its state, how far it came, and what the engine that has it says."""
    import dataclasses
    from pathlib import Path

    from paceline.cli.checkpoint_screen import show_json, show_table
    from paceline.cli.run_list import look_at
    from paceline.launch.engines import control_of

    control, submission = control_of(run)
    said = control.status(submission)
    listed = look_at(Path(run))
    begun = any((Path(run) / name).exists() for name in ("config.yaml", "logs"))
    if submission.engine != "local" and not begun:
        listed = dataclasses.replace(listed, state="submitted")  # no launcher was there so far
    if as_json:
        engine = {"engine": submission.engine, "job": submission.job, "says": said}
        show_json({**listed.to_json(), **engine})
        return
    show_table(_COLUMNS, [listed.row()])
    echo(f"{submission.engine}: {said}")


@app.command()
def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is yet to come, until the end.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="N", help="The output of this rank, from its log.")
    ] = None,
) -> None:
    """Print a run's output: what its engine has of it, or one rank's log."""
    from paceline.cli.run_list import look_at
    from paceline.launch.engines import control_of
    from paceline.launch.engines.local import newest_log, show_log

    control, submission = control_of(run)
    try:
        if rank is None:
            raise typer.Exit(control.logs(submission, follow=follow))
        goes_on = (lambda: look_at(submission.run).state == "running") if follow else None
        show_log(newest_log(submission.run, rank), follow=goes_on)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def cancel(run: Run) -> None:
    """End a run: it has the time to save that launch.grace gives it."""
    from paceline.launch.engines import control_of

    control, submission = control_of(run)
    echo(control.cancel(submission))
