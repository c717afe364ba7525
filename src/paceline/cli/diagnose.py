"""``paceline diagnose``: what happened in a run, what it cost, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.screen import echo


def diagnose(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run; without one, the latest in runs/.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the story as JSON.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Leave nothing out: every save, evaluation and line.")
    ] = False,
) -> None:
    """Tell what happened in a run: the root cause first, then all of it in order, and its cost.

    Reads the events of the run and the logs of its ranks, nothing else; also while it runs.
    """
    from paceline.diagnose.story import of_run

    story = of_run(run)
    if as_json:
        from paceline.cli.checkpoint_screen import show_json

        show_json(story.to_json())
        return
    from paceline.diagnose.story.report import write

    for line in write(story, everything=everything, heading=_Heading):
        echo(line, bold=isinstance(line, _Heading))


class _Heading(str):
    """A line of ours, to be shown in bold."""
