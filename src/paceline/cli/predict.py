"""``paceline predict``: what a run's model says of data, as a file."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.inference import (
    DataSource,
    Ema,
    Overrides,
    Ranks,
    Run,
    ShareGpu,
    Spread,
    WhichWeights,
    absolute,
    headline,
    run_inference,
)
from paceline.cli.screen import echo


def predict(
    run: Run,
    out: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Where to: a name that ends in .npy, .npz, .safetensors or .jsonl."
        ),
    ],
    which: WhichWeights = "last",
    ema: Ema = False,
    data: DataSource = "val",
    take: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Keep this part of the output, like logits.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
    nproc: Ranks = None,
    layout: Spread = None,
    overrides: Overrides = None,
    share_gpu: ShareGpu = False,
) -> None:
    """Write what the model of a run predicts: a row for each sample, in the order of the data.

    The data needs no targets. The file is written as predictions come, and is there when it is
    whole; on any layout and number of ranks it holds the same rows.
    """
    from paceline.checkpoint.locate import which_named
    from paceline.trainer.prediction_files import check_out
    from paceline.trainer.run_inference import InferenceRequest

    path = check_out(absolute(out), overwrite=overwrite)
    request = InferenceRequest(
        "predict",
        which=which_named(which),
        ema=ema,
        out=str(path),
        overwrite=overwrite,
        take=take,
    )
    outcome = run_inference(
        run,
        request,
        data=data,
        nproc=nproc,
        layout=layout,
        share_gpu=share_gpu,
        overrides=overrides,
    )
    echo(headline(run, request, data, outcome))
    echo(f"  written to       {out}")
