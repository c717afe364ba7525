"""What ``paceline train`` reports when a run has ended, and how to go on from there."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import NoReturn

from paceline.cli.console import say
from paceline.config import Config
from paceline.credentials import Secret
from paceline.events.wording import at_step
from paceline.launch.run_folder import RunFolder
from paceline.masking import masked
from paceline.track.summary import Summary


def is_finished(run: RunFolder, stored: Config, config: Config) -> bool:
    """Whether a run asked to go on has nothing left to do; says so."""
    finished = Summary.read(run.path).finished
    same_length = (stored.train.steps, stored.train.epochs) == (
        config.train.steps,
        config.train.epochs,
    )
    if finished is None or finished.reason == "interrupted" or not same_length:
        return False
    say(f"{run} is already finished, at step {finished.step}.")
    say(f"To train it longer: {_longer(config, run)}")
    return True


def say_done(config: Config, run: RunFolder, source: str | None, *, resumed: bool) -> None:
    """What the run achieved, where it lies, and what to try next.

    ``source`` is its config file; that of a run that was ``resumed`` is not known, so that nothing
    is said of starting it anew.
    """
    say()
    for line in Summary.read(run.path).lines():
        say(line)
    say_where(run)
    say()
    say("What next:")
    say(f"  train longer     {_longer(config, run)}")
    if config.track.tensorboard:
        say(f"  see the curves   tensorboard --logdir {_quoted(run.tensorboard)}")
    elif not resumed:
        again = f"paceline train {shlex.quote(source)}" if source else "paceline train"
        say(f"  see the curves   {again} --set track.tensorboard=true")
    if config.track.mlflow is not None:
        store = masked(mlflow_uri(config, run))
        say(f"                   mlflow ui --backend-store-uri {store}")
    if source is None and not resumed:
        say("  your own model   paceline config show > my.yaml, edit, paceline train my.yaml")


def say_where(run: RunFolder, *, error: bool = False) -> None:
    """Where a run lies that has ended."""
    say(f"  run folder       {run}", error=error)


def say_stopped(
    run: RunFolder, stop: KeyboardInterrupt | SystemExit, settings: Path | None = None
) -> NoReturn:
    """Where a run was stopped, what is saved, how to go on; then leave with the signal's status.

    ``settings`` are those that it was to go on with, where they are other ones.
    """
    summary = Summary.read(run.path)
    where = f"stopped {at_step(summary.step.step if summary.step else None)}"
    saved = summary.checkpoint
    if saved is None:
        say(f"{where}; nothing had been saved yet")
    elif summary.step is None or saved.step >= summary.step.step:
        say(f"{where}; saved to {saved.path}")
    else:
        say(f"{where}; the last checkpoint is of step {saved.step}: {saved.path}")
    say(f"{not_taken(run, settings)}{resume_hint(run)}")
    raise SystemExit(exit_status(stop)) from None


def has_checkpoint(run: RunFolder) -> bool:
    """Whether anything of a run was saved."""
    return Summary.read(run.path).checkpoint is not None


def not_taken(run: RunFolder, settings: Path | None) -> str:
    """A line that says so where a run ended before it had taken over its new ``settings``."""
    if settings is None or run.has_config(settings.read_text(encoding="utf-8")):
        return ""
    return f"The new settings were not taken over: {run.config} is as it was.\n"


def resume_hint(run: RunFolder) -> str:
    """The command that goes on with a run."""
    saved = Summary.read(run.path).checkpoint
    begin = "To start it again" if saved is None else f"To continue after step {saved.step}"
    return f"{begin}: paceline train --resume {_quoted(run.path)}"


def _longer(config: Config, run: RunFolder) -> str:
    if config.train.epochs is not None:
        more = f"train.epochs={2 * config.train.epochs}"
    else:
        more = f"train.steps={2 * (config.train.steps or 1)}"
    return f"paceline train --resume {_quoted(run.path)} --set {more}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def exit_status(stop: KeyboardInterrupt | SystemExit) -> int:
    """What a shell expects of a process that ended because of a signal."""
    return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0)


def mlflow_uri(config: Config, run: RunFolder) -> str:
    """The MLflow store of a run: the config's, the environment's, or one beside the run folder."""
    assert config.track.mlflow is not None
    local = f"sqlite:///{run.path.absolute().parent / 'mlflow.db'}"
    uri = config.track.mlflow.uri
    if uri is not None and uri.startswith("env:"):
        return Secret(uri).reveal()
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or local
