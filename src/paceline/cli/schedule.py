"""``paceline schedule``: a pipeline schedule as a table and a picture; starts nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.screen import echo


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble, zbv or dualpipev.",
        ),
    ],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "--pp", help="Ranks of the pipeline; 4, or what --stages needs."),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 8,
    stages: Annotated[
        int | None,
        typer.Option(
            help="Stages over all ranks; without it, one a rank, or two where the schedule loops.",
            show_default=False,
        ),
    ] = None,
    forward: Annotated[float, typer.Option(help="Cost of a forward.")] = 1.0,
    backward: Annotated[
        float, typer.Option(help="Cost of a backward: its input and weight gradients, half each.")
    ] = 2.0,
    p2p: Annotated[float, typer.Option(help="Cost of sending a result to another rank.")] = 0.0,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also draw it as SVG.", show_default=False)
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also draw it as PNG; needs matplotlib.", show_default=False
        ),
    ] = None,
) -> None:
    """Print a pipeline schedule: who does what when, and how long ranks idle.

    A row is a rank, and time runs to the right. 0F2 is stage 0, forward, microbatch 2:

    \b
      F    forward                      I    gradient of the input alone
      B    backward                     W    gradient of the weights alone
      ...  idle: the bubble

    Pictures (--svg, --png) have a colour for each, a darker one for a rank's later stages, and the
    microbatch as a number. 256 ranks, and 8192 stages × microbatches, are the most.
    """
    from pathlib import Path

    from paceline.errors import LayoutError
    from paceline.layout.pipeline_drawing import legend, write_png
    from paceline.layout.pipeline_schedules import Costs, build_schedule, default_stages_per_rank

    if ranks is None:
        ranks = 4 if stages is None else max(stages // default_stages_per_rank(name), 1)
    if stages is not None and (ranks < 1 or stages % ranks):
        raise LayoutError(
            f"--stages {stages} must be a multiple of --ranks {ranks}: ranks hold equally many."
        )
    built = build_schedule(
        name,
        ranks,
        microbatches,
        None if stages is None else stages // ranks,
        Costs(forward, backward, backward / 2, backward / 2, p2p),
    )
    echo(built.table())
    echo(legend(built))
    if svg is not None:
        Path(svg).write_text(built.svg(), encoding="utf-8")
        echo(f"wrote {svg}")
    if png is not None:
        write_png(built, png)
        echo(f"wrote {png}")
