"""The trackers that a config asks for, each with what it needs to know of the run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

from paceline.cli.train_report import mlflow_uri
from paceline.config import Config, code_folders, import_target
from paceline.config.keys import flat
from paceline.config.target_sections import TrackerTarget
from paceline.credentials import revealed
from paceline.errors import ConfigError
from paceline.launch.run_folder import RunFolder
from paceline.track import CSV, Comet, MLflow, Progress, TensorBoard, Tracker, WandB
from paceline.track.csv_file import FILE_NAME as CSV_NAME


def trackers_of(config: Config, run: RunFolder) -> list[Tracker]:
    """Those that ``config`` asks for, for the run in the folder ``run``."""
    track = config.track
    about: dict[str, Any] = dict(
        run_name=run.path.name,
        run_dir=run.path,
        tags=config.tags,
        params=flat(config.model_dump(exclude={"tags"})),
    )
    trackers: list[Tracker] = []
    if track.progress:
        trackers.append(Progress())
    if track.tensorboard:
        trackers.append(TensorBoard(run.tensorboard))
    if track.csv:
        trackers.append(CSV(run.path / CSV_NAME))
    if track.mlflow is not None:
        uri, experiment = mlflow_uri(config, run), track.mlflow.experiment
        trackers.append(MLflow(uri=uri, experiment=experiment, **about))
    if track.wandb is not None:
        trackers.append(WandB(**track.wandb.model_dump(), **about))
    if track.comet is not None:
        trackers.append(Comet(**track.comet.model_dump(), **about))
    for number, section in enumerate(track.trackers):
        trackers.append(_own(config, section, run.path, number))
    return trackers


def _own(config: Config, section: TrackerTarget, run_dir: Path, number: int) -> Tracker:
    """A tracker of the user's; one that takes ``run_dir`` is given it."""
    build = import_target(section.target, code_folders(config))
    args = cast(dict[str, Any], revealed(section.args, everywhere=False))
    try:
        takes = inspect.signature(build).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    if "run_dir" in takes and "run_dir" not in args:
        args["run_dir"] = run_dir
    tracker = build(**args)
    if not all(callable(getattr(tracker, name, None)) for name in ("handle", "close")):
        raise ConfigError(
            f"track.trackers.{number}.target {section.target!r} made a {type(tracker).__name__}, "
            "which has no handle(event) and close(). Derive it from paceline.track.RunRecorder."
        )
    return cast(Tracker, tracker)
