"""``paceline runs``: the runs below a folder, what state they are in and how far they came."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.screen import echo

STATES = ("running", "finished", "failed", "interrupted")


def runs(
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
    columns = ("run", "state", "layout", "step", "loss", "age", "tags")
    show_table(columns, [run.row() for run in found])
