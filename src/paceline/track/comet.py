"""Events as an experiment of Comet."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.errors import MissingExtra
from paceline.events import MediaLogged
from paceline.track.media import histogram_of, text_of
from paceline.track.run_recorder import Ending, RemoteRun, RunRecorder, shown_params

STATE_FILE = "comet.json"
_QUIET = dict(
    log_code=False,
    log_graph=False,
    log_git_metadata=False,
    log_git_patch=False,
    log_env_details=False,
    auto_param_logging=False,
    auto_metric_logging=False,
    auto_output_logging=None,
    parse_args=False,
    display_summary_level=0,
)
"""What this process was called with and its environment are not the run's, and may hold secrets."""


class Comet(RunRecorder):
    """Logs a run to Comet.

    The key is that of ``comet login``, or ``COMET_API_KEY``; it is never written anywhere. With
    ``mode="offline"`` everything goes to an archive in ``run_dir``, for ``comet upload`` to send
    later. ``params`` are shown as the experiment's parameters. With a ``run_dir``, the key of the
    experiment is kept in it, and a resumed run goes on in the same one.

    Comet cannot take a point back. Steps that a resumed run repeats have both values.
    """

    name: ClassVar[str] = "Comet"

    def __init__(
        self,
        *,
        project: str = "paceline",
        workspace: str | None = None,
        mode: Literal["online", "offline"] = "online",
        run_name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        tags: Sequence[str] = (),
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("comet_ml") is None:
            raise MissingExtra("Comet", "comet")
        self._project, self._workspace, self._mode = project, workspace, mode
        self._run_name, self._tags = run_name, list(tags)
        self._folder = Path("." if run_dir is None else run_dir).absolute() / "comet"
        self._id = RemoteRun(run_dir, STATE_FILE)
        self._params = shown_params(params)
        self._experiment: Any = None

    def begin(self, facts: Mapping[str, Any], first_step: int) -> None:
        """Open the experiment, or go on in it."""
        if self._experiment is None:
            self._experiment = self._open()
            if self._run_name is not None:
                self._experiment.set_name(self._run_name)
            self._experiment.add_tags(self._tags)
            self._experiment.log_parameters(self._params)
        self._experiment.log_parameters({f"run.{key}": value for key, value in facts.items()})

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the numbers of a step."""
        self._experiment.log_metrics(dict(values), step=step)

    def show(self, event: MediaLogged) -> None:
        """Log an image, a histogram or a text."""
        if event.what == "image":
            about = {"caption": event.caption} if event.caption else None
            self._experiment.log_image(event.file, event.name, step=event.step, metadata=about)
        elif event.what == "histogram":
            from comet_ml import Histogram

            found, shown = histogram_of(event), Histogram()
            middles = [a / 2 + b / 2 for a, b in itertools.pairwise(found.edges)]
            shown.add(middles, [int(count) for count in found.counts])
            self._experiment.log_histogram_3d(shown, event.name, step=event.step)
        else:
            about = {"name": event.name}
            self._experiment.log_text(text_of(event), step=event.step, metadata=about)

    def end(self, how: Ending) -> None:
        """Close the experiment with the status it ended in."""
        experiment, self._experiment = self._experiment, None
        experiment.log_other("outcome", how)
        experiment.end()

    def _open(self) -> Any:
        # Its news of uploads would end up in the middle of the progress bar.
        logging.getLogger("comet_ml").setLevel(logging.WARNING)
        import comet_ml

        earlier = self._id.load()
        where = {"project_name": self._project, "workspace": self._workspace, **_QUIET}
        if self._mode == "offline":
            where["offline_directory"] = str(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            if earlier is not None:
                return comet_ml.ExistingOfflineExperiment(previous_experiment=earlier, **where)
            experiment = comet_ml.OfflineExperiment(**where)
        elif earlier is not None:
            return comet_ml.ExistingExperiment(previous_experiment=earlier, **where)
        else:
            experiment = comet_ml.Experiment(**where)
        self._id.save(experiment.get_key())
        return experiment
