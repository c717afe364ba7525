"""Events as a run of Weights & Biases."""

from __future__ import annotations

import html
import importlib.util
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.errors import MissingExtra
from paceline.events import MediaLogged
from paceline.track.media import histogram_of, text_of
from paceline.track.run_recorder import Ending, RemoteRun, RunRecorder, shown_params

STATE_FILE = "wandb.json"


class WandB(RunRecorder):
    """Logs a run to Weights & Biases.

    The key is that of ``wandb login``, or ``WANDB_API_KEY``; it is never written anywhere. With
    ``mode="offline"`` everything goes to files in ``run_dir``, for ``wandb sync`` to send later.
    ``params`` are shown as the run's config. With a ``run_dir``, the id of the run is kept in it,
    and a resumed run goes on in the same one.

    W&B cannot take a point back. Steps that a resumed run repeats keep the values they had.
    """

    name: ClassVar[str] = "W&B"

    def __init__(
        self,
        *,
        project: str = "paceline",
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
        run_name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        tags: Sequence[str] = (),
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("wandb") is None:
            raise MissingExtra("W&B", "wandb")
        self._project, self._entity, self._mode = project, entity, mode
        self._run_name, self._tags = run_name, list(tags)
        self._folder = None if run_dir is None else Path(run_dir).absolute()
        self._id = RemoteRun(run_dir, STATE_FILE)
        self._params = shown_params(params)
        self._run: Any = None
        self._last = -1

    def begin(self, facts: Mapping[str, Any], first_step: int) -> None:
        """Open the run, or go on in it."""
        if self._run is None:
            self._run = self._open()
            self._last = int(self._run.step) if self._run.resumed else -1
        self._run.config.update({f"run.{k}": v for k, v in facts.items()}, allow_val_change=True)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the numbers of a step that has none of them yet."""
        if step >= self._last:
            self._last = step
            self._run.log({**values, "time": time}, step=step)

    def show(self, event: MediaLogged) -> None:
        """Log an image, a histogram or a text of a step that is not past."""
        import wandb

        if event.step < self._last:
            return
        self._last = event.step
        shown: Any
        if event.what == "image":
            shown = wandb.Image(event.file, caption=event.caption or None)
        elif event.what == "histogram":
            found = histogram_of(event)
            shown = wandb.Histogram(np_histogram=(found.counts, found.edges))
        else:
            shown = wandb.Html(f"<pre>{html.escape(text_of(event))}</pre>", inject=False)
        self._run.log({event.name: shown}, step=event.step)

    def end(self, how: Ending) -> None:
        """Close the run with the status it ended in."""
        run, self._run = self._run, None
        run.finish(exit_code=0 if how == "finished" else 1)

    def _open(self) -> Any:
        import wandb

        run_id = self._id.load()
        if run_id is None:
            run_id = secrets.token_hex(4)
            self._id.save(run_id)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            id=run_id,
            resume="allow" if self._mode == "online" else None,
            name=self._run_name,
            tags=self._tags,
            config=self._params,
            dir=None if self._folder is None else str(self._folder),
            # What this process was called with, its environment and its output are not the run's,
            # and may hold what nobody is to see.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
