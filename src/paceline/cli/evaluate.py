"""``paceline evaluate``: the loss and the metrics of a run's model."""

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
    headline,
    run_inference,
)
from paceline.cli.screen import echo, echo_json


def evaluate(
    run: Run,
    which: WhichWeights = "last",
    ema: Ema = False,
    data: DataSource = "val",
    batches: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only so many global batches.", show_default=False, min=1),
    ] = None,
    nproc: Ranks = None,
    layout: Spread = None,
    overrides: Overrides = None,
    share_gpu: ShareGpu = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Evaluate the model of a run, with the weights of any of its checkpoints.

    On any layout and number of ranks every sample counts once. The run is left as it is.
    """
    from paceline.checkpoint.locate import which_named
    from paceline.trainer.run_inference import InferenceRequest

    request = InferenceRequest("evaluate", which=which_named(which), ema=ema, batches=batches)
    outcome = run_inference(
        run,
        request,
        data=data,
        nproc=nproc,
        layout=layout,
        share_gpu=share_gpu,
        overrides=overrides,
        quiet=as_json,
    )
    if as_json:
        import json
        import math

        # JSON has no NaN and no infinity: they are text, as in a run's events.
        outcome["metrics"] = {
            name: value if math.isfinite(value) else str(value)
            for name, value in outcome["metrics"].items()
        }
        echo_json(json.dumps({"run": run, "which": which, "ema": ema, "data": data, **outcome}))
        return
    echo(headline(run, request, data, outcome))
    for name, value in outcome["metrics"].items():
        echo(f"  {name:<16} {value:.6g}")
