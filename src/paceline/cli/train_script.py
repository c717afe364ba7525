"""``paceline train --script``: start the ranks of a torchrun-style script."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.cli.console import say
from paceline.cli.train_nodes import meet_about, refuse_copies
from paceline.cli.train_report import exit_status, say_where
from paceline.cli.train_request import TrainRequest
from paceline.compat.backends import check_installed
from paceline.config import resolve
from paceline.launch.environment import RUN_DIR
from paceline.launch.run_choice import RunChoice


def run_script(request: TrainRequest) -> None:
    """Start the ranks of a script, and say where its logs are: its output is the user's."""
    from paceline.diagnose.hangs.oversee import HangOverseer
    from paceline.launch.job import LocalJob
    from paceline.launch.local import launch
    from paceline.launch.restart_policy import RestartLimits

    assert request.script is not None
    if request.backend is not None:
        check_installed(request.backend)
    script = Path(request.script)
    # Only for the number of ranks and restarts: what the demo would say to it is no matter.
    config = resolve(request.load(None, checked=False))
    request.check_nodes(config)
    refuse_copies(config)
    assert isinstance(config.launch.nproc, int)
    choice = RunChoice(run_dir=request.run_dir, name=script.stem, auto=request.auto)
    backend = [] if request.backend is None else ["--backend", request.backend]
    command = [*backend, "script", str(script), *request.script_arguments]
    with contextlib.ExitStack() as stack:
        joined = None
        if config.launch.rdzv is not None:
            joined = meet_about(config, choice, stack, script=" ".join(command))
            say(joined.where(), error=True)
            run = joined.run
        else:
            run = choice.make()
            stack.enter_context(run.in_use())
        # A script may not be made to run twice: its restarts, unlike a config's, must be asked for.
        restarts = config.launch.max_restarts if request.asks_for("launch.max_restarts") else 0
        more = (
            {"env": config.launch.env}
            if joined is None
            else joined.job_options(config, is_script=True)
        )
        more["env"] = {RUN_DIR: str(run.path.absolute()), **more["env"]}
        job = LocalJob(
            command=command,
            nproc=config.launch.nproc,
            log_dir=run.logs,
            limits=RestartLimits(restarts, config.launch.max_preemptions, config.launch.backoff),
            standby=config.launch.standby,
            grace=config.launch.grace,
            # What a script does between two collectives is its own affair: only reported.
            hang_watcher=lambda: HangOverseer(action="wait", events_dir=run.path),
            **more,
        )
        try:
            launch(job)
        except (KeyboardInterrupt, SystemExit) as stop:
            say(f"stopped; logs: {run.logs}", error=True)
            raise SystemExit(exit_status(stop)) from None
    say(error=True)
    say_where(run, error=True)
