"""What ``paceline evaluate`` and ``paceline predict`` share: the ranks that do it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import say
from paceline.cli.options import Ema, Overrides, ShareGpu, Spread

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.launch.run_folder import RunFolder
    from paceline.trainer.run_inference import InferenceRequest

Run = Annotated[str, typer.Argument(metavar="RUN", help="The folder of the run.")]
WhichWeights = Annotated[
    str,
    typer.Option(
        "--which",
        metavar="best|last|STEP",
        help="Whose weights: the best checkpoint's by the run's metric, the newest's, or a step's.",
    ),
]
DataSource = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="val|train|TARGET",
        help="The run's validation or training data, or the import path of a function or class "
        "that makes a dataset, like package.module:test_set.",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--nproc", metavar="N", help="How many ranks; else as many as the run.", show_default=False
    ),
]
__all__ = ["DataSource", "Ema", "Overrides", "Ranks", "Run", "ShareGpu", "Spread", "WhichWeights"]


def run_inference(
    run: str,
    request: InferenceRequest,
    *,
    data: str,
    nproc: str | None,
    layout: str | None,
    share_gpu: bool,
    overrides: list[str] | None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Do what ``request`` says on ranks of this machine; what came of it.

    ``nproc`` to ``overrides`` are the flags that change the run's config, as they were given.
    ``quiet``: the output is the command's alone, and progress goes to standard error.
    """
    import dataclasses

    from paceline.config import dump, with_code
    from paceline.errors import RankFailed
    from paceline.launch.run_folder import open_run
    from paceline.trainer.run_inference import read_outcome

    folder = open_run(run)
    flags = {
        "--nproc": ("launch.nproc", nproc),
        "--layout": ("layout", layout),
        "--share-gpu": ("launch.share_gpu", "true" if share_gpu else None),
    }
    config = with_code(_config_of(folder, data, flags, list(overrides or [])))
    asked = dataclasses.replace(request, data="train" if data == "train" else "val")
    with contextlib.ExitStack() as stack:
        there = Path(tempfile.mkdtemp(prefix="paceline-inference-"))
        stack.callback(shutil.rmtree, there, ignore_errors=True)
        (there / "config.yaml").write_text(dump(config), encoding="utf-8")
        try:
            _launch(config, folder, there, asked.write(there), quiet=quiet)
        except RankFailed:
            stack.pop_all()  # the error names a log in it
            raise
        return read_outcome(there)


def headline(run: str, request: InferenceRequest, data: str, outcome: dict[str, Any]) -> str:
    """Whose weights of which data: the first line of what a command prints."""
    whose = f"{request.which}, averaged weights" if request.ema else str(request.which)
    return f"{run}, {whose}: step {outcome['step']}, {outcome['samples']} samples of {data}"


def _config_of(
    folder: RunFolder, data: str, flags: dict[str, tuple[str, str | None]], overrides: list[str]
) -> Config:
    """The run's config on this machine alone, with what the command line changes of it."""
    from paceline.cli.train_request import TrainRequest
    from paceline.config import load, resolve

    stored = load(folder.config)
    given = {
        f"{key}={value}": f"{flag} {value}"
        for flag, (key, value) in flags.items()
        if value is not None
    }
    if data not in ("val", "train"):
        given[f"data.val={{target: {data!r}}}"] = f"--data {data}"
    if stored.launch.rdzv is not None:  # its machines are not asked for this
        given |= dict.fromkeys(("launch.rdzv=null", "launch.nnodes=1"), "one machine")
    request = TrainRequest([], None, [], given, overrides, None, None)
    request.adjust_ranks_of(stored)
    return resolve(request.load(folder.config))


def _launch(config: Config, run: RunFolder, folder: Path, request: Path, *, quiet: bool) -> None:
    from paceline.config import code_folders
    from paceline.launch.job import LocalJob, to_stdout
    from paceline.launch.local import launch
    from paceline.track import Progress, Tracker, following

    assert isinstance(config.launch.nproc, int)
    command = [str(folder / "config.yaml"), str(run), str(request)]
    trackers: list[Tracker] = []
    if config.track.progress:
        trackers.append(Progress(sys.stderr if quiet else None))
    job = LocalJob(
        command=["-m", "paceline.trainer.run_inference", *command, "--code", *code_folders(config)],
        nproc=config.launch.nproc,
        log_dir=folder / "logs",
        events_dir=folder,
        grace=config.launch.grace,
        output=_to_stderr if quiet else to_stdout,
    )
    try:
        with following(folder, trackers):
            launch(job)
    except KeyboardInterrupt:
        say("stopped; nothing was written", error=True)
        raise SystemExit(130) from None


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def absolute(out: str) -> str:
    """The path of a file, wherever the ranks run."""
    return os.path.abspath(os.path.expanduser(out))
