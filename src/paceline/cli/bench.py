"""``paceline bench``: what this machine, or several, can do; measured, not looked up."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.bench_wire import wire
from paceline.cli.options import Machines, MeetingPlace, Patience, SecretFile, file_reference
from paceline.cli.screen import echo, echo_json

if TYPE_CHECKING:
    from paceline.bench.comm_request import CommRequest
    from paceline.bench.launching import BenchPlacement

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure the network, and what a training run makes of it.",
)


@app.callback()
def _only_subcommands() -> None:
    """Measure the network, and what a training run makes of it."""


app.command()(wire)


@app.command()
def comm(
    nproc: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks on each machine; else one per GPU, or 2."),
    ] = None,
    nnodes: Machines = None,
    rdzv: MeetingPlace = None,
    secret_file: SecretFile = None,
    wait: Patience = 60.0,
    collectives: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="What to measure: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, "
            "reduce, gather, scatter, send_recv, barrier. Without it, all of them.",
            show_default=False,
        ),
    ] = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter,"
    "send_recv,barrier",
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,…", help="Bytes, or K, M or G of them.")
    ] = "1K,16K,256K,1M,4M,16M,64M",
    group: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Who talks: all, within (the ranks of each machine), across (one rank of each "
            "machine). Without it, all of these that differ.",
            show_default=False,
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="What elements are.")] = "float32",
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="cpu: over Gloo; cuda: over NCCL.")
    ] = "auto",
    seconds: Annotated[
        float, typer.Option(metavar="S", help="About how long to measure each collective and size.")
    ] = 0.3,
    pairs: Annotated[
        bool, typer.Option("--pairs/--no-pairs", help="Also measure each link by itself.")
    ] = True,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all numbers as JSON; -: print them, no table."
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw a picture: .png, .svg or .pdf; needs matplotlib."),
    ] = None,
) -> None:
    """Measure collectives between ranks: latency and bandwidth by size and group, and each link.

    Of several machines with several ranks each, ends in a description of the links that a
    config's reduction.links takes.
    """
    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C: the ranks and the files go first
    from paceline.bench.comm_request import place_problems, read_request
    from paceline.bench.launching import check_outputs, read_place
    from paceline.errors import ConfigError

    request = read_request(
        collectives=collectives,
        sizes=sizes,
        groups=group,
        dtype=dtype,
        device=device,
        seconds=seconds,
        pairs=pairs,
    )
    place = read_place(
        nproc=nproc,
        nnodes=nnodes,
        rdzv=rdzv,
        wait=wait,
        device=device,
        secret=file_reference(secret_file),
    )
    problems = place_problems(request, place.nproc, place.nnodes)
    problems += check_outputs([("--json", json_file), ("--plot", plot)])
    if problems:
        raise ConfigError(problems)
    if plot is not None:
        from paceline.bench.plot import check_plot

        check_plot(plot)
    try:
        _measure_comm(place, request, json_file, plot)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        raise SystemExit(130) from None


def _measure_comm(
    place: BenchPlacement, request: CommRequest, json_file: str | None, plot: str | None
) -> None:
    import json
    from pathlib import Path

    from paceline.bench.comm_result import CommResult
    from paceline.bench.launching import measure

    found = measure(
        place,
        "paceline.bench.comm_rank",
        request.to_json(),
        asked=request.asked(),
        progress=lambda text: echo(text, err=True, nl=False),
        say=lambda text: echo(text, err=True),
    )
    text = json.dumps(found, indent=2)
    if json_file == "-":
        echo_json(text)
    else:
        from paceline.bench.comm_report import show, wide_console

        show(CommResult.from_dict(found), wide_console())
        if json_file is not None:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
            echo(f"wrote {json_file}", err=True)
    if plot is not None:
        from paceline.bench.plot import write_plot

        write_plot(CommResult.from_dict(found), plot)
        echo(f"wrote {plot}", err=True)


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)
