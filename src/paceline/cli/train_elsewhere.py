"""``paceline train --on ENGINE``: hand a run to what starts it elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.console import say
from paceline.cli.train_auto import check_same
from paceline.cli.train_report import exit_status, resume_hint, say_done, say_stopped
from paceline.cli.train_request import TrainRequest
from paceline.config import Config
from paceline.config.launch_engines import ENGINES
from paceline.errors import ConfigError, RankFailed
from paceline.launch.engines import INDEX, ClusterJob, LaunchEngine, engine_named
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder, open_run

_ENGINES_OWN = ("launch.on", "launch.nnodes", "launch.rdzv", "launch.secret")
"""What the launcher on each machine is told by the engine."""
_SECTIONS = tuple(f"launch.{name}" for name in ENGINES if name != "local")
"""What only the engine needs to know."""


def run_elsewhere(request: TrainRequest, engine: LaunchEngine | None = None) -> None:
    """Check what can be checked here, and hand the run to its engine: the one that was named."""
    engine = engine_named(request.engine()) if engine is None else engine
    config = _load(request, engine)
    job = _job(request, config)
    if request.dry_run:
        say(engine.plan(job).rstrip("\n"))
        return
    try:
        status = engine.start(job)
    except (KeyboardInterrupt, SystemExit) as stop:
        raise SystemExit(exit_status(stop)) from None
    if status:
        raise SystemExit(status)


def _load(request: TrainRequest, engine: LaunchEngine) -> Config:
    """The config, with every problem of it and of the engine's section at once."""
    source = _source(request)
    is_script = request.script is not None
    sample = _sample_of(request, source, engine)
    unchecked = sample.load(source, checked=False)
    problems = engine.problems(unchecked)
    if not problems:
        request.imply(engine.implied(unchecked))
        sample = _sample_of(request, source, engine)
        unchecked = sample.load(source, checked=False)
    if not is_script:
        try:
            sample.load(source, devices=engine.gpus_per_machine(unchecked))
        except ConfigError as error:
            problems = [*error.problems, *problems]
    if problems:
        raise ConfigError(problems)
    return unchecked


def _sample_of(request: TrainRequest, source: Path | None, engine: LaunchEngine) -> TrainRequest:
    """The request of one run of several, for whose number ``{index}`` stands in what is set."""
    plain = [text for text in request.overrides if INDEX not in text]
    if len(plain) == len(request.overrides):
        return request
    config = dataclasses.replace(request, overrides=plain).load(source, checked=False)
    if (index := engine.index_of_sample(config)) is None:
        return request
    overrides = [text.replace(INDEX, index) for text in request.overrides]
    return dataclasses.replace(request, overrides=overrides)


def _is_for_engine(override: str) -> bool:
    key = override.partition("=")[0].strip()
    return key in _ENGINES_OWN or ".".join(key.split(".")[:2]) in _SECTIONS


def _source(request: TrainRequest) -> Path | None:
    if request.script is not None:
        return None
    if request.resume is not None:
        return open_run(request.resume).config
    return next((Path(os.path.abspath(config)) for config in request.configs), None)


def _job(request: TrainRequest, config: Config) -> ClusterJob:
    if request.auto:
        assert request.run_dir is not None
        run = Path(request.run_dir)
        if request.script is None and RunFolder(run).is_begun:
            check_same(request, config, RunFolder(run))
    elif request.resume is not None:
        run = open_run(request.resume).path
    else:
        name = config.name if request.script is None else Path(request.script).stem
        choice = RunChoice(run_dir=request.run_dir, root=config.track.run_dir, name=name)
        run = choice.name_it() if request.dry_run else choice.make().path
    return ClusterJob(
        config=config,
        train=tuple(_arguments(request)),
        script_arguments=tuple(request.script_arguments),
        run=Path(os.path.abspath(run)),
        folder=Path.cwd(),
        resume=request.resume is not None,
        apply=request.apply,
        shown=functools.partial(_shown, RunFolder(Path(os.path.abspath(run))), request),
    )


@contextlib.contextmanager
def _shown(run: RunFolder, request: TrainRequest, config: Config) -> Iterator[None]:
    """Show and record the run during the block, and say at its end what came of it."""
    from paceline.cli.train_trackers import trackers_of
    from paceline.track import following

    is_script = request.script is not None
    say(f"run folder: {run}", error=is_script)
    try:
        with following(run.path, [] if is_script else trackers_of(config, run)):
            yield
    except (KeyboardInterrupt, SystemExit) as stop:
        if is_script:
            raise
        say_stopped(run, stop)
    except RankFailed as error:
        if is_script:
            raise
        raise error.followed_by(resume_hint(run)) from None
    if not is_script:
        source = next(iter(request.configs), None)
        say_done(config, run, source, resumed=request.resume is not None)


def _arguments(request: TrainRequest) -> list[str]:
    """What is trained, as arguments of ``paceline train`` that hold in any folder."""
    given = [text for text in (*request.flags, *request.overrides) if not _is_for_engine(text)]
    if request.script is not None:
        source = ["--script", os.path.abspath(request.script)]
        source += [] if request.backend is None else ["--backend", request.backend]
    else:
        source = [os.path.abspath(config) for config in request.configs]
    return [*source, *(word for text in given for word in ("--set", text))]
