"""Events as an MLflow run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import MissingExtra, TrainingError
from paceline.events import Event, MediaLogged, RunFailed, RunFinished, RunStarted
from paceline.track.run_recorder import as_shown, facts_of, shown_params
from paceline.track.scalars import Numbers, scalars
from paceline.track.tracker import Recorder
from paceline.untrusted import parse_json, read_bytes, write_private

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

STATE_FILE = "mlflow.json"
_MOST_STATE_BYTES = 64 * 1024
# What MLflow takes in one request.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000


class MLflow(Recorder):
    """Logs a run to MLflow.

    ``uri`` is a tracking URI (a server, or ``sqlite:///path.db``); without one,
    ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the working directory. ``params`` are shown
    beside the metrics, and ``tags`` as tags without a value. With a ``run_dir``, the id of the
    MLflow run is kept in it, and a resumed run goes on in the same one.

    With ``join`` it logs to the run that ``mlflow.start_run()`` has begun in this process, where
    that logs to. Whoever began it ends it.

    MLflow cannot take a point back. Steps that a resumed run repeats keep the values they had.
    """

    name: ClassVar[str] = "MLflow"

    def __init__(
        self,
        *,
        uri: str | None = None,
        experiment: str = "paceline",
        run_name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        tags: Sequence[str] = (),
        params: Mapping[str, Any] | None = None,
        join: bool = False,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("mlflow") is None:
            raise MissingExtra("MLflow", "mlflow")
        self._joined = _active_run(uri, run_name) if join else None
        if self._joined is not None:
            uri = self._joined[0]
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self._shown_uri = as_shown("uri", self._uri)
        self._experiment = experiment
        self._run_name = run_name
        self._state = None if run_dir is None else Path(run_dir) / STATE_FILE
        self._params, self._tags = shown_params(params), list(tags)
        self._session: _Session | None = None
        self._ended = "KILLED"

    def record(self, events: Sequence[Event]) -> None:
        """Log the numbers in ``events``, in as few requests as possible."""
        from mlflow.entities import Metric

        points: list[Metric] = []
        for event in events:
            if isinstance(event, RunStarted):
                facts = {f"run.{name}": value for name, value in facts_of(event).items()}
                self._open().log_params({**self._params, **facts})
                self._ended = "KILLED"  # unless we hear of another end
            elif isinstance(event, Numbers):
                stamp = int(event.time * 1000)
                points += [Metric(k, v, stamp, event.step) for k, v in scalars(event)]
            elif isinstance(event, MediaLogged):
                self._open().log_file(event)
            elif isinstance(event, RunFinished):
                self._ended = "KILLED" if event.reason == "interrupted" else "FINISHED"
            elif isinstance(event, RunFailed):
                self._ended = "FAILED"
        if points:
            self._open().log_points(points)

    def finish(self) -> None:
        """Close the MLflow run with the status it ended in."""
        if self._session is not None:
            if self._joined is not None:
                self._session = None
                return
            self._session.client.set_terminated(self._session.run_id, status=self._ended)
            self._session = None

    def _open(self) -> _Session:
        if self._session is None:
            # Its news about database tables would end up in the middle of the progress bar.
            for noisy in ("mlflow.store.db.utils", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            from mlflow import MlflowClient

            client = MlflowClient(tracking_uri=self._uri)
            if self._joined is not None:
                run = client.get_run(self._joined[1])
                for tag in self._tags:
                    client.set_tag(run.info.run_id, tag, "")
            else:
                run = self._earlier_run(client)
            if run is None:
                experiment = _experiment_id(client, self._experiment, self._uri)
                tags = dict.fromkeys(self._tags, "")
                run = client.create_run(experiment, run_name=self._run_name, tags=tags)
                self._remember(run.info.run_id)
            self._session = _Session(client, run)
        return self._session

    def _earlier_run(self, client: MlflowClient) -> Run | None:
        if self._state is None or not self._state.exists():
            return None
        state = parse_json(read_bytes(self._state, _MOST_STATE_BYTES))
        if not isinstance(state, dict) or not isinstance(state.get("run_id"), str):
            raise ValueError(
                f"{self._state} does not name a run of MLflow. Delete it for a new one."
            )
        if state.get("uri") != self._shown_uri:
            return None  # the user has moved to another store: a new run there
        client.update_run(state["run_id"], status="RUNNING")
        return client.get_run(state["run_id"])

    def _remember(self, run_id: str) -> None:
        if self._state is not None:
            self._state.parent.mkdir(parents=True, exist_ok=True)
            part = self._state.with_name(f".{STATE_FILE}.part")
            state = {"uri": self._shown_uri, "run_id": run_id}
            write_private(part, json.dumps(state).encode())
            part.replace(self._state)


class _Session:
    """One MLflow run that is being written to."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client = client
        self.run_id: str = run.info.run_id
        self._known_params = set(run.data.params)
        # The last step of each metric; those of a run that goes on are asked for when needed.
        self._last_step: dict[str, int] = {}
        self._resumed_metrics = set(run.data.metrics)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log those parameters that are new: MLflow lets none be changed."""
        from mlflow.entities import Param

        new = [
            Param(key, str(value)[:_LONGEST_PARAM])
            for key, value in params.items()
            if key not in self._known_params
        ]
        for start in range(0, len(new), _MOST_PARAMS):
            self.client.log_batch(self.run_id, params=new[start : start + _MOST_PARAMS])
        self._known_params.update(params)

    def log_points(self, points: Sequence[Metric]) -> None:
        """Log the points of steps that have none yet."""
        new = []
        for point in points:
            if point.step > self._last(point.key):
                self._last_step[point.key] = point.step
                new.append(point)
        for start in range(0, len(new), _MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=new[start : start + _MOST_METRICS])

    def log_file(self, event: MediaLogged) -> None:
        """An image, a histogram (as JSON) or a text, among the artifacts of the run."""
        self.client.log_artifact(self.run_id, event.file, f"{event.what}s")

    def _last(self, key: str) -> int:
        if key not in self._last_step:
            history = (
                self.client.get_metric_history(self.run_id, key)
                if key in self._resumed_metrics
                else []
            )
            self._last_step[key] = max((point.step for point in history), default=-1)
        return self._last_step[key]


def _active_run(uri: str | None, run_name: str | None) -> tuple[str, str]:
    """Where the run logs to that was begun in this thread, and its id."""
    if uri is not None or run_name is not None:
        raise TrainingError(
            "MLflow(join=True) logs to the run that mlflow.start_run() has begun, which has its "
            "place and its name. Leave uri and run_name out."
        )
    import mlflow

    run = mlflow.active_run()
    if run is None:
        raise TrainingError(
            "MLflow(join=True): no run is active. Make the tracker after mlflow.start_run(), in "
            "the same thread, or leave join out for a run of its own."
        )
    return mlflow.get_tracking_uri(), run.info.run_id


def _experiment_id(client: MlflowClient, name: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # By default MLflow would put artifacts of a local store beside whoever started the run.
    file = uri.removeprefix("sqlite:///")
    artifacts = None if file == uri else str(Path(file).absolute().parent / "mlartifacts")
    try:
        return str(client.create_experiment(name, artifact_location=artifacts))
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another run has just made it
        if found is None:
            raise
        return str(found.experiment_id)
