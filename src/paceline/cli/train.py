"""``paceline train``: start a run, follow it, and say what came of it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import say
from paceline.cli.options import Overrides, SecretFile, ShareGpu, Spread, file_reference

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.cli.train_nodes import Joined
    from paceline.config import Config
    from paceline.diagnose.hangs.oversee import HangOverseer
    from paceline.launch.run_choice import RunChoice
    from paceline.launch.run_folder import RunFolder
    from paceline.track import Tracker

_PLACES = ("local",)


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="A YAML, JSON or Python config; without one, the demo. With --script, what "
            "follows -- goes to the script.",
            show_default=False,
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Run this torchrun-style script instead of a config."),
    ] = None,
    nproc: Annotated[
        str | None, typer.Option(metavar="N", help="How many ranks; else one per GPU, or 2.")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many machines, or least:most; start the same command on each of them.",
        ),
    ] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where they meet; further ones after commas stand in."
        ),
    ] = None,
    secret_file: SecretFile = None,
    layout: Spread = None,
    on: Annotated[
        str, typer.Option(metavar="PLACE", help=f"Where the ranks run: {', '.join(_PLACES)}.")
    ] = _PLACES[0],
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN_DIR", help="Go on with the run in this folder.")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="The run's own folder, which must be new.")
    ] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How often failed ranks are started again; by default 3, for a script 0.",
        ),
    ] = None,
    share_gpu: ShareGpu = False,
) -> None:
    """Train what a config describes, or run a script on several ranks.

    With nothing at all: a small byte-level GPT on the source of Python's standard library.
    """
    config, script_arguments = _split_at_dashes(arguments or [])
    flags = {
        "--nproc": ("launch.nproc", nproc),
        "--nnodes": ("launch.nnodes", nnodes),
        "--rdzv": ("launch.rdzv", rdzv),
        "--secret-file": ("launch.secret", file_reference(secret_file)),
        "--layout": ("layout", layout),
        "--max-restarts": ("launch.max_restarts", max_restarts),
        "--share-gpu": ("launch.share_gpu", "true" if share_gpu else None),
    }
    request = _Request(
        configs=config,
        script=script,
        script_arguments=script_arguments,
        flags={
            f"{k}={v}": _as_typed(flag, secret_file if flag == "--secret-file" else v)
            for flag, (k, v) in flags.items()
            if v is not None
        },
        overrides=list(overrides or []),
        resume=resume,
        run_dir=run_dir,
    )
    try:
        request.check(on, layout)
        (_run_config if script is None else _run_script)(request)
    except KeyboardInterrupt:
        # Click would make "Aborted!" and status 1 of it.
        say("interrupted before the ranks were started", error=True)
        raise SystemExit(130) from None


@dataclass
class _Request:
    """What the command line asks for. ``flags`` maps overrides to the flags they came from."""

    configs: list[str]
    script: str | None
    script_arguments: list[str]
    flags: dict[str, str]
    overrides: list[str]
    resume: str | None
    run_dir: str | None
    _adjusted: dict[str, str] = field(default_factory=dict)

    def check(self, on: str, layout: str | None) -> None:
        """Refuse what does not go together, all of it at once."""
        from paceline.cli.train_usage import resume_problem
        from paceline.errors import ConfigError

        problems = []
        if on not in _PLACES:
            problems.append(
                f"--on {on}: not available; this version starts ranks on: {', '.join(_PLACES)}"
            )
        if len(self.configs) > 1:
            problems.append(f"one CONFIG at most; got {', '.join(self.configs)}")
        if self.script is not None:
            problems += self._problems_with_script(layout)
        elif self.script_arguments:
            problems.append(
                f"{' '.join(self.script_arguments)}: arguments after -- are for a script; name it "
                "with --script FILE"
            )
        if self.resume is not None and (problem := resume_problem(self.resume)):
            problems.append(f"--resume {self.resume}: {problem}")
        if self.resume is not None and self.configs:
            problems.append(
                f"--resume {self.resume} with CONFIG {self.configs[0]}: a run folder has its own "
                "config; change values of it with --set"
            )
        for flag, folder in (("--resume", self.resume), ("--run-dir", self.run_dir)):
            if folder is not None and not folder.strip():
                problems.append(f"{flag} {folder!r}: the name is empty; name a folder")
        if self.resume is not None and self.run_dir is not None:
            problems.append(
                f"--resume {self.resume} with --run-dir {self.run_dir}: a resumed run stays in its "
                "folder; leave --run-dir out"
            )
        if problems:
            raise ConfigError(problems)

    def _problems_with_script(self, layout: str | None) -> list[str]:
        from paceline.cli.train_usage import script_problem

        assert self.script is not None
        problems = []
        if problem := script_problem(self.script):
            problems.append(f"--script {self.script}: {problem}")
        if self.configs:
            problems.append(
                f"--script {self.script} with CONFIG {self.configs[0]}: give one or the other; "
                "arguments of the script go after --"
            )
        for flag, value in (
            ("--layout", layout),
            ("--set", " --set ".join(self.overrides) or None),
            ("--resume", self.resume),
        ):
            if value is not None:
                problems.append(
                    f"{flag} {value}: for configs only; the script decides for itself. Arguments "
                    "of the script go after --"
                )
        if self.asks_for("launch.share_gpu"):
            problems.append(
                "--share-gpu: for configs only; in a script, call World.init(share_gpu=True)"
            )
        return problems

    def asks_for(self, key: str) -> bool:
        """Whether a flag names this key of the config."""
        return any(override.partition("=")[0] == key for override in self.flags)

    def load(self, source: str | Path | None, *, checked: bool = True) -> Config:
        """The config with all overrides; problems name the flags they come from."""
        from paceline.config import load, load_checked
        from paceline.config.overrides import in_users_words
        from paceline.errors import ConfigError

        read = load_checked if checked else load
        try:
            return read(source, [*self._adjusted, *self.flags, *self.overrides])
        except ConfigError as error:
            words = {**self._adjusted, **self.flags}
            raise ConfigError(in_users_words(error.problems, words)) from None

    def adjust_ranks_of(self, stored: Config) -> None:
        """Let --nproc and --nnodes change the layout of a config that has all written out, and
        vice versa.

        A run folder and ``paceline config show`` write both, so that one of them alone would
        always contradict the other.
        """
        from paceline.layout import Layout

        given = {text.partition("=")[0].strip(): text for text in (*self.flags, *self.overrides)}
        words = {key: self.flags.get(text, f"--set {text}") for key, text in given.items()}
        ranks = [words[key] for key in ("launch.nproc", "launch.nnodes") if key in words]
        if ranks and "layout" not in words and stored.layout != "auto":
            rest = str(Layout.parse(stored.layout)).partition(",")[2]
            self._adjusted = {f"layout={rest or 'auto'}": ranks[0]}
        elif "layout" in words and "launch.nproc" not in words and stored.launch.nproc != "auto":
            self._adjusted = {"launch.nproc=auto": words["layout"]}

    def check_nodes(self, config: Config) -> None:
        """What :func:`paceline.config.check` says of the machines, where it is not asked."""
        from paceline.config.checks import node_problems
        from paceline.errors import ConfigError

        problems = [text for _, text in node_problems(config)]
        if problems:
            raise ConfigError(problems)


def _as_typed(flag: str, value: str | None) -> str:
    """The words of the command line behind an override."""
    return flag if flag == "--share-gpu" else f"{flag} {value}"


def _split_at_dashes(positionals: list[str]) -> tuple[list[str], list[str]]:
    """Positional arguments before and after ``--``, which the parser has dropped by now."""
    if "--" not in sys.argv:
        return positionals, []
    after = sys.argv[sys.argv.index("--") + 1 :]
    return positionals[: len(positionals) - len(after)], after


# A script: its output is the user's, we only say where the logs are.


def _run_script(request: _Request) -> None:
    from pathlib import Path

    from paceline.cli.train_report import exit_status
    from paceline.config import resolve
    from paceline.diagnose.hangs.oversee import HangOverseer
    from paceline.launch.job import LocalJob
    from paceline.launch.local import launch
    from paceline.launch.restart_policy import RestartLimits
    from paceline.launch.run_choice import RunChoice

    assert request.script is not None
    script = Path(request.script)
    # Only for the number of ranks and restarts: what the demo would say to it is no matter.
    config = resolve(request.load(None, checked=False))
    request.check_nodes(config)
    assert isinstance(config.launch.nproc, int)
    choice = RunChoice(run_dir=request.run_dir, name=script.stem)
    command = ["script", str(script), *request.script_arguments]
    with contextlib.ExitStack() as stack:
        joined = None
        if config.launch.rdzv is not None:
            joined = _meet(config, choice, stack, script=" ".join(command))
            say(joined.where(), error=True)
        run = choice.make() if joined is None else joined.run
        # A script may not be made to run twice: its restarts, unlike a config's, must be asked for.
        restarts = config.launch.max_restarts if request.asks_for("launch.max_restarts") else 0
        job = LocalJob(
            command=command,
            nproc=config.launch.nproc,
            log_dir=run.logs,
            limits=RestartLimits(restarts, config.launch.max_preemptions, config.launch.backoff),
            standby=config.launch.standby,
            grace=config.launch.grace,
            # What a script does between two collectives is its own affair: only reported.
            hang_watcher=lambda: HangOverseer(action="wait", events_dir=run.path),
            **({} if joined is None else joined.job_options()),
        )
        try:
            launch(job)
        except (KeyboardInterrupt, SystemExit) as stop:
            say(f"stopped; logs: {run.logs}", error=True)
            raise SystemExit(exit_status(stop)) from None


# A config: a run folder, events, trackers.


def _run_config(request: _Request) -> None:
    from paceline.cli.train_report import is_finished, say_done
    from paceline.config import code_notes, dump, load, resolve, summary, with_code
    from paceline.errors import ConfigError
    from paceline.launch.run_choice import RunChoice
    from paceline.launch.run_folder import open_run

    if request.resume is not None:
        source = None
        run = open_run(request.resume)
        stored = load(run.config)
        request.adjust_ranks_of(stored)
        config = resolve(request.load(run.config))
        if is_finished(run, stored, config):
            return
    else:
        source = next(iter(request.configs), None)
        with contextlib.suppress(ConfigError):  # said, with all other problems, by request.load
            request.adjust_ranks_of(load(source))
        config = resolve(request.load(source))
    choice = RunChoice(request.resume, request.run_dir, config.track.run_dir, config.name)
    with contextlib.ExitStack() as stack:
        joined = None
        say(summary(config))
        for note in code_notes(config):
            say(note)
        config = with_code(config)
        if config.launch.rdzv is not None:
            joined = _meet(config, choice, stack)
            run = joined.run
            say(joined.where())
        else:
            run = choice.make()
            stack.enter_context(run.in_use())
            if request.resume is None:
                run.save_config(dump(config))
        say(f"run folder: {run}")
        settings = None if request.resume is None else _new_settings(config, run, stack)
        own = None if joined is None else _own_config(config, stack)
        _launch(config, run, joined, settings, own, resume=request.resume is not None)
        if joined is not None and not joined.is_main:
            say(f"done; the run is shown on node 0 ({joined.rendezvous.nodes[0]})")
            return
    say_done(config, run, source, resumed=request.resume is not None)


def _meet(
    config: Config,
    choice: RunChoice,
    stack: contextlib.ExitStack,
    script: str | None = None,
) -> Joined:
    """Meet the launchers of the other machines, and agree with them on the run."""
    from paceline.cli.train_nodes import SharedRunFolder, asked_of, meet
    from paceline.config import dump
    from paceline.config.keys import flat

    is_script = script is not None
    nodes = SharedRunFolder(
        choice,
        config_text=None if is_script else dump(config),
        checkpoint_where=config.checkpoint.where,
        stack=stack,
    )
    settings = {"launch": config.launch.model_dump()} if is_script else config.model_dump()
    more = {"--script": script} if script is not None else {}
    return meet(config, nodes, asked_of(flat(settings), **more), stack)


def _new_settings(config: Config, run: RunFolder, stack: contextlib.ExitStack) -> Path | None:
    """The settings with which a run goes on, outside of its folder, where they are other ones.

    Its ranks put them there when all of them have accepted them: a resume that is refused, or
    killed before, leaves the run as it was.
    """
    from paceline.config import dump

    return None if run.has_config(dump(config)) else _own_config(config, stack)


def _own_config(config: Config, stack: contextlib.ExitStack) -> Path:
    """The config in a folder that is this launcher's alone.

    Ranks of several machines get theirs from the launcher that starts them: a config is code, and
    the run's folder may be one that another machine made.
    """
    import tempfile
    from pathlib import Path

    from paceline.config import dump

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
) -> None:
    from paceline.cli.train_report import (
        exit_status,
        has_checkpoint,
        not_taken,
        resume_hint,
        say_stopped,
    )
    from paceline.config import code_folders
    from paceline.errors import RankFailed
    from paceline.launch.job import LocalJob
    from paceline.launch.local import launch
    from paceline.launch.restart_policy import RestartLimits
    from paceline.track import following

    assert isinstance(config.launch.nproc, int)
    more: dict[str, Any] = {"events_dir": run.path}
    arguments = []
    if joined is not None:
        more |= joined.job_options(config)
        resume = joined.resume
        arguments += [] if joined.shared else ["--own-folder"]
    arguments += ["--resume"] if resume else []
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
            run.path, _trackers(config, run), shown=lambda: joined is None or joined.is_main
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
        raise RankFailed(
            f"{error}\n{not_taken(run, settings)}{resume_hint(run)}",
            rank=error.rank,
            exit_code=error.exit_code,
            traceback=error.traceback,
            would_recur=error.would_recur,
        ) from None


def _hang_watcher(config: Config, run: RunFolder) -> HangOverseer:
    """Tells hangs to the events, and to the console where no progress bar shows those."""
    from paceline.diagnose.hangs.oversee import HangOverseer, to_stderr

    say = None if config.track.progress else to_stderr
    return HangOverseer(action=config.hangs.action, events_dir=run.path, say=say)


def _trackers(config: Config, run: RunFolder) -> list[Tracker]:
    from paceline.cli.train_report import mlflow_uri
    from paceline.config.keys import flat
    from paceline.track import MLflow, Progress, TensorBoard

    trackers: list[Tracker] = []
    if config.track.progress:
        trackers.append(Progress())
    if config.track.tensorboard:
        trackers.append(TensorBoard(run.tensorboard))
    if config.track.mlflow is not None:
        trackers.append(
            MLflow(
                uri=mlflow_uri(config, run),
                experiment=config.track.mlflow.experiment,
                run_name=run.path.name,
                run_dir=run.path,
                params=flat(config.model_dump()),
            )
        )
    return trackers
