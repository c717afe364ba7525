"""``paceline train CONFIG``: a run folder, the ranks, and the trackers that show them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import say
from paceline.cli.train_auto import config_to_go_on_with
from paceline.cli.train_nodes import Joined, meet_about, refuse_copies
from paceline.cli.train_report import (
    exit_status,
    has_checkpoint,
    is_finished,
    not_taken,
    resume_hint,
    say_done,
    say_stopped,
)
from paceline.cli.train_request import TrainRequest
from paceline.config import (
    Config,
    code_folders,
    config_notes,
    dump,
    load,
    resolve,
    summary,
    with_code,
)
from paceline.errors import ConfigError, RankFailed
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder, open_run

if TYPE_CHECKING:
    from paceline.diagnose.hangs.oversee import HangOverseer


def run_config(request: TrainRequest) -> None:
    """Train what a config describes: make or open its run folder, start its ranks, show them."""
    source = next(iter(request.configs), None)
    with contextlib.ExitStack() as stack:
        run, config = _run_and_config(request, source, stack)
        if config is None:
            return
        resumed = request.resume is not None or (request.auto and run is not None and run.is_begun)
        choice = _choice(request, config)
        say(summary(config))
        for note in config_notes(config):
            say(note)
        config = with_code(config)
        joined = None
        if config.launch.rdzv is not None:
            joined = meet_about(config, choice, stack)
            run, resumed = joined.run, joined.resume
            say(joined.where())
        else:
            if run is None:
                run = choice.make()
                stack.enter_context(run.in_use())
            if not resumed:
                run.save_config(dump(config))
        say(f"run folder: {run}")
        settings = _new_settings(config, run, stack) if resumed else None
        own = None if joined is None else _own_config(config, stack)
        _launch(config, run, joined, settings, own, resume=resumed, which=request.goes_back)
        if joined is not None and not joined.is_main:
            say(f"done; the run is shown on node 0 ({joined.rendezvous.nodes[0]})")
            return
    say_done(config, run, source, resumed=resumed)


def _run_and_config(
    request: TrainRequest, source: str | None, stack: contextlib.ExitStack
) -> tuple[RunFolder | None, Config | None]:
    """The config to train, resolved, and the run's folder where it is held already.

    The config is ``None`` where a run that was to go on is finished.
    """
    if request.resume is not None:
        run = open_run(request.resume)
        stored = load(run.config)
        request.adjust_ranks_of(stored)
        config = resolve(request.load(run.config))
        refuse_copies(config)
        # One that goes back has something left to do, however it ended.
        over = request.goes_back is None and is_finished(run, stored, config)
        return None, None if over else config
    with contextlib.suppress(ConfigError):  # said, with all other problems, by request.load
        request.adjust_ranks_of(load(source))
    asked = request.load(source)
    config = resolve(asked)
    refuse_copies(config)
    if not request.auto:
        return None, config
    assert request.run_dir is not None
    run = RunFolder(Path(request.run_dir))
    if config.launch.rdzv is None:
        # Held before it is looked at: the same command may have been started twice.
        run = _choice(request, config).make()
        stack.enter_context(run.in_use())
    return run, config_to_go_on_with(request, asked, run) if run.is_begun else config


def _choice(request: TrainRequest, config: Config) -> RunChoice:
    return RunChoice(
        request.resume, request.run_dir, config.track.run_dir, config.name, request.auto
    )


def _new_settings(config: Config, run: RunFolder, stack: contextlib.ExitStack) -> Path | None:
    """The settings with which a run goes on, outside of its folder, where they are other ones.

    Its ranks put them there when all of them have accepted them: a resume that is refused, or
    killed before, leaves the run as it was.
    """
    return None if run.has_config(dump(config)) else _own_config(config, stack)


def _own_config(config: Config, stack: contextlib.ExitStack) -> Path:
    """The config in a folder that is this launcher's alone.

    Ranks of several machines get theirs from the launcher that starts them: a config is code, and
    the run's folder may be one that another machine made.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-settings-"))
    file = Path(folder) / "config.yaml"
    file.write_text(dump(config), encoding="utf-8")
    return file


def _launch(
    config: Config,
    run: RunFolder,
    joined: Joined | None = None,
    settings: Path | None = None,
    own_config: Path | None = None,
    *,
    resume: bool,
    which: str | None = None,
) -> None:
    from paceline.cli.train_trackers import trackers_of
    from paceline.launch.job import LocalJob
    from paceline.launch.local import launch
    from paceline.launch.restart_policy import RestartLimits
    from paceline.track import following

    assert isinstance(config.launch.nproc, int)
    more: dict[str, Any] = {"events_dir": run.path, "env": config.launch.env}
    arguments = []
    if joined is not None:
        more |= joined.job_options(config)
        resume = joined.resume
        arguments += [] if joined.shared else ["--own-folder"]
    arguments += ["--resume"] if resume else []
    arguments += [] if which is None else ["--which", which]
    arguments += [] if settings is None else ["--settings", str(settings)]
    arguments += [] if own_config is None else ["--config", str(own_config)]
    arguments += ["--code", *code_folders(config)]
    job = LocalJob(
        command=["-m", "paceline.trainer.run", str(run), *arguments],
        nproc=config.launch.nproc,
        log_dir=run.logs,
        limits=RestartLimits(
            config.launch.max_restarts, config.launch.max_preemptions, config.launch.backoff
        ),
        standby=config.launch.standby,
        grace=config.launch.grace,
        hang_watcher=None if config.hangs.after is None else lambda: _hang_watcher(config, run),
        **more,
    )
    try:
        # Of several machines, the one that is node 0 shows the run; another may come to be it.
        with following(
            run.path, trackers_of(config, run), shown=lambda: joined is None or joined.is_main
        ):
            launch(job)
    except (KeyboardInterrupt, SystemExit) as stop:
        if joined is not None and not joined.rendezvous.is_closed():
            say("this machine has left the run; the same command joins it again")
            raise SystemExit(exit_status(stop)) from None
        say_stopped(run, stop, settings)
    except RankFailed as error:
        if error.would_recur and not has_checkpoint(run):
            raise  # to start it again would only repeat it
        raise error.followed_by(f"{not_taken(run, settings)}{resume_hint(run)}") from None


def _hang_watcher(config: Config, run: RunFolder) -> HangOverseer:
    """Tells hangs to the events, and to the console where no progress bar shows those."""
    from paceline.diagnose.hangs.oversee import HangOverseer, to_stderr

    say = None if config.track.progress else to_stderr
    return HangOverseer(action=config.hangs.action, events_dir=run.path, say=say)
