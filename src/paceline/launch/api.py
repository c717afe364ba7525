"""``paceline.launch``: start ranks from Python, on this machine or on a cluster."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import Config, dump
from paceline.config.launch_engines import ENGINES
from paceline.errors import ConfigError, LaunchError
from paceline.launch.engines import RunControl, Submission, control_of
from paceline.launch.local import call, read_value, write_payload
from paceline.launch.run_folder import SUBMISSION, new_run_at, stamped

_CONFIGS = (".yaml", ".yml", ".json")
_CALLS_FUNCTION = """\
from pathlib import Path

from paceline.launch.worker import call_payload

call_payload(Path(__file__).parent)
"""


@dataclass(frozen=True)
class LaunchedRun:
    """A run that ``launch`` has started; on a cluster that queues jobs it may have to wait there.

    ``paceline runs`` asks for the same things on the command line.
    """

    run: Path
    """The run's folder."""

    def status(self) -> str:
        """How it is, in the words of the engine that has it."""
        control, submission = self._control()
        return control.status(submission)

    def logs(self, *, follow: bool = False) -> None:
        """Print its output; with ``follow``, until it ends."""
        control, submission = self._control()
        control.logs(submission, follow=follow)

    def cancel(self) -> str:
        """End it, giving it time to save; what was done, in words."""
        control, submission = self._control()
        return control.cancel(submission)

    def result(self) -> Any:
        """What the function returned on rank 0; ``LaunchError`` where it has not, so far."""
        folder = self.run / SUBMISSION / "call"
        if not (folder / "value.pkl").exists():
            raise LaunchError(f"{self.run}: no function has returned there; now: {self.status()}")
        return read_value(folder)

    def _control(self) -> tuple[RunControl, Submission]:
        return control_of(str(self.run))


def launch(
    what: Callable[..., Any] | str | os.PathLike[str] | Mapping[str, Any] | Config,
    *args: Any,
    on: str = "local",
    nproc: int | None = None,
    nnodes: int | str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Run a function, a script or a config on several ranks, here or on a cluster.

    ``what`` is a function, which every rank calls with ``args``; a script, with ``args`` as its
    arguments; or a config: a file, a mapping or a ``Config``. ``on`` names what starts the ranks
    (``local``, ``ssh``, ``slurm``, ``kubernetes``, ``ray``, ``mpi``), ``nproc`` how many there are
    on each of ``nnodes`` machines. ``settings`` are keys of a config, like
    ``{"launch.slurm.partition": "gpu"}``; for functions and scripts, those of ``launch`` alone.

    A function on this machine returns what it returned on rank 0. All else returns a
    ``LaunchedRun``, when it has ended or, where an engine queues it, at once. A run that fails is
    a ``LaunchError``.
    """
    if on not in ENGINES:
        raise ConfigError(f"on={on!r}: there is no such engine; use {', '.join(ENGINES)}")
    if callable(what) and on == "local":
        if settings or nnodes not in (None, 1):
            raise ConfigError(
                "a function on this machine takes nproc alone, or name an engine: on="
            )
        logs = None if run_dir is None else Path(run_dir) / "logs"
        return call(
            functools.partial(what, *args), nproc=2 if nproc is None else nproc, log_dir=logs
        )
    run = Path(os.path.abspath(run_dir or stamped("runs", _name(what))))
    command = [sys.executable, "-m", "paceline", "train", *_what(what, args, run)]
    command[4:4] = _flags(on, nproc, nnodes, run, settings or {})
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        raise LaunchError(
            f"the run in {str(run)!r} ended with status {ended.returncode}; what went wrong stands "
            f"above. The command was: {shlex.join(command[2:])}"
        )
    return LaunchedRun(run)


def _name(what: Any) -> str:
    if isinstance(what, str | os.PathLike):
        return Path(what).stem
    if isinstance(what, Config):
        return what.name
    named = what.get("name") if isinstance(what, Mapping) else getattr(what, "__name__", None)
    return named if isinstance(named, str) and named.isidentifier() else "run"


def _flags(
    on: str,
    nproc: int | None,
    nnodes: int | str | None,
    run: Path,
    settings: Mapping[str, Any],
) -> list[str]:
    flags = ["--on", on, "--run-dir", str(run)]
    if nproc is not None:
        flags += ["--nproc", str(nproc)]
    if nnodes is not None:
        flags += ["--nnodes", str(nnodes)]
    for key, value in settings.items():
        try:
            flags += ["--set", f"{key}={json.dumps(value)}"]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"settings[{key!r}] cannot be written down: {error}") from None
    return flags


def _what(what: Any, args: Sequence[Any], run: Path) -> list[str]:
    """The arguments of ``paceline train`` for it; what they name is written into the run's folder.

    Nothing is written where a script or a config is named by its file.
    """
    if isinstance(what, str | os.PathLike):
        path = os.fspath(what)
        if path.endswith(_CONFIGS):
            return [path, *_no_arguments(args)]
        after = ["--", *map(str, args)] if args else []
        return ["--script", path, *after]
    if not callable(what) and not isinstance(what, Mapping | Config):
        raise ConfigError(
            f"what to launch must be a function, the path of a script or a config, or a config; "
            f"got a {type(what).__name__}."
        )
    new_run_at(run)
    folder = run / SUBMISSION / ("call" if callable(what) else "")
    folder.mkdir(parents=True, exist_ok=True)
    if callable(what):
        write_payload(folder, functools.partial(what, *args))
        (folder / "call.py").write_text(_CALLS_FUNCTION)
        return ["--script", str(folder / "call.py")]
    file = folder / "config.yaml"
    if isinstance(what, Config):
        file.write_text(dump(what), encoding="utf-8")
    else:
        file = file.with_suffix(".json")
        file.write_text(json.dumps(what), encoding="utf-8")
    return [str(file), *_no_arguments(args)]


def _no_arguments(args: Sequence[Any]) -> list[str]:
    if args:
        raise ConfigError(f"a config takes no arguments; got {', '.join(map(repr, args))}")
    return []
