"""What ``paceline train`` was asked for: its flags, checked together, and the config they make."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoint.locate import which_named
from paceline.cli.train_usage import resume_problem, script_problem
from paceline.compat.backends import check_backend
from paceline.compat.backends import script_problem as backend_problem
from paceline.config import Config, load, load_checked
from paceline.config.checks import node_problems
from paceline.config.launch_engines import ENGINES
from paceline.config.overrides import in_users_words
from paceline.errors import ConfigError
from paceline.launch.run_pattern import check_pattern, is_pattern
from paceline.layout import Layout


@dataclass
class TrainRequest:
    """What the command line asks for. ``flags`` maps overrides to the flags they came from."""

    configs: list[str]
    script: str | None
    script_arguments: list[str]
    flags: dict[str, str]
    overrides: list[str]
    resume: str | None
    run_dir: str | None
    dry_run: bool = False
    apply: bool = False
    which: str | None = None
    auto: bool = False
    """Go on with the run in ``run_dir`` if there is one, else start it (``--resume auto``)."""
    backend: str | None = None
    """The library that the script is written for, as ``paceline.compat.backends`` has it."""
    _adjusted: dict[str, str] = field(default_factory=dict)
    _engine: str | None = None

    @property
    def goes_back(self) -> str | None:
        """The checkpoint that the run goes back to; ``None`` where it goes on from the newest."""
        return None if self.which == "last" else self.which

    def check(self, layout: str | None) -> None:
        """Refuse what does not go together, all of it at once."""
        problems = self._problems_with_engine()
        if len(self.configs) > 1:
            problems.append(f"one CONFIG at most; got {', '.join(self.configs)}")
        if self.script is not None:
            problems += self._problems_with_script(layout)
        elif self.backend is not None:
            problems.append(
                f"--backend {self.backend}: for scripts only, which it says how to run; name one "
                "with --script FILE. Where a config's ranks compute is launch.device, as in --set "
                "launch.device=cpu"
            )
        elif self.script_arguments:
            problems.append(
                f"{' '.join(self.script_arguments)}: arguments after -- are for a script; name it "
                "with --script FILE"
            )
        if self.resume is not None and (problem := resume_problem(self.resume)):
            problems.append(f"--resume {self.resume}: {problem}")
        if self.which is not None:
            problems += self._problems_with_which(self.which)
        if self.resume is not None and self.configs:
            problems.append(
                f"--resume {self.resume} with CONFIG {self.configs[0]}: a run folder has its own "
                "config; change values of it with --set"
            )
        for flag, folder in (("--resume", self.resume), ("--run-dir", self.run_dir)):
            if folder is not None and not folder.strip():
                problems.append(f"{flag} {folder!r}: the name is empty; name a folder")
        if self.run_dir is not None and is_pattern(self.run_dir):
            try:
                check_pattern(self.run_dir)
            except ConfigError as error:
                problems += error.problems
        problems += self._problems_with_auto()
        if self.resume is not None and self.run_dir is not None:
            problems.append(
                f"--resume {self.resume} with --run-dir {self.run_dir}: a resumed run stays in its "
                "folder; leave --run-dir out"
            )
        if problems:
            raise ConfigError(problems)

    def engine(self) -> str:
        """What starts the ranks: ``--on``, else the config's ``launch.on``."""
        if self._engine is None:  # a config may be a program, which is not run for every question
            self._engine = self._find_engine()
        return self._engine

    def _find_engine(self) -> str:
        for text in reversed((*self.flags, *self.overrides)):
            key, _, value = text.partition("=")
            if key.strip() == "launch.on":
                return value.strip().strip("'\"")
        source = next(iter(self.configs), None)
        if self.resume is not None or source is None:
            return "local"
        with contextlib.suppress(ConfigError):  # said, with all other problems, by load
            return load(source).launch.on
        return "local"

    def is_elsewhere(self) -> bool:
        """Whether an engine other than this launcher starts the ranks."""
        return self.engine() != "local"

    def _problems_with_engine(self) -> list[str]:
        """Flags that are for an engine, without it."""
        on = self.engine()
        problems = []
        if on not in ENGINES:
            problems.append(f"--on {on}: there is no such engine; use {', '.join(ENGINES)}")
        for flag, key in (("--hosts", "hosts"), ("--hostfile", "hostfile")):
            given = [text for text, words in self.flags.items() if words.startswith(f"{flag} ")]
            if given and on not in ("ssh", "mpi"):
                problems.append(f"{flag}: for --on ssh and --on mpi")
            elif given and not self.asks_for(f"launch.{on}.{key}"):
                problems.append(f"{flag}: name the engine with --on {on} as well")
        if self.dry_run and on == "local":
            problems.append(
                "--dry-run: for --on ssh, slurm, kubernetes, ray and mpi; paceline config show "
                "prints what a config says"
            )
        if self.goes_back is not None and on != "local":
            problems.append(
                f"--which {self.which} with --on {on}: whatever starts it again would go back "
                "again; go back on this machine first, with --on local --set train.steps=… for a "
                "few steps"
            )
        if self.apply and on != "kubernetes":
            problems.append("--apply: for --on kubernetes")
        if self.apply and self.dry_run:
            problems.append("--apply with --dry-run: give one or the other")
        return problems

    def _problems_with_which(self, which: str) -> list[str]:
        problems: list[str] = []
        try:
            which_named(which)
        except ConfigError as error:
            problems += error.problems
        if self.resume is None:
            problems.append(
                f"--which {which}: it chooses a checkpoint of a run to go on from; name the run "
                "with --resume RUN_DIR"
            )
        return problems

    def _problems_with_auto(self) -> list[str]:
        if not self.auto:
            return []
        if self.run_dir is None:
            return [
                "--resume auto: name the folder that the run starts in, and goes on in when the "
                "command is repeated: --run-dir DIR"
            ]
        if is_pattern(self.run_dir):
            return [
                f"--resume auto with --run-dir {self.run_dir}: a pattern is a new folder each "
                "time, so that there would be nothing to go on with; name the folder itself"
            ]
        return []

    def _problems_with_script(self, layout: str | None) -> list[str]:
        assert self.script is not None
        problems: list[str] = []
        if self.backend is not None:
            try:
                check_backend(self.backend)
            except ConfigError as error:
                problems += error.problems
        if problem := script_problem(self.script):
            problems.append(f"--script {self.script}: {problem}")
        elif self.backend is not None and (
            problem := backend_problem(self.backend, Path(self.script))
        ):
            problems.append(f"--script {self.script} --backend {self.backend}: {problem}")
        if self.configs:
            problems.append(
                f"--script {self.script} with CONFIG {self.configs[0]}: give one or the other; "
                "arguments of the script go after --"
            )
        # How a script is launched is the command's affair; what it trains is its own.
        others = [text for text in self.overrides if not text.strip().startswith("launch.")]
        for flag, value in (
            ("--layout", layout),
            ("--set", " --set ".join(others) or None),
            ("--resume", self.resume),
        ):
            if value is not None:
                problems.append(
                    f"{flag} {value}: for configs only; the script decides for itself. Arguments "
                    "of the script go after --"
                )
        problems += [
            f"{flag}: for configs only; name the folder of a script's run with --run-dir"
            for flag in ("--name", "--tag")
            if any(words.startswith(f"{flag} ") for words in self.flags.values())
        ]
        if self.asks_for("launch.share_gpu"):
            problems.append(
                "--share-gpu: for configs only; in a script, call World.init(share_gpu=True)"
            )
        return problems

    def asks_for(self, key: str) -> bool:
        """Whether a flag or ``--set`` names this key of the config."""
        given = (*self.flags, *self.overrides)
        return any(override.partition("=")[0].strip() == key for override in given)

    def load(
        self, source: str | Path | None, *, checked: bool = True, devices: int | None = None
    ) -> Config:
        """The config with all overrides; problems name the flags they come from.

        ``devices`` is the number of GPUs of every machine, where that is not this one.
        """
        given = [*self._adjusted, *self.flags, *self.overrides]
        try:
            return load_checked(source, given, devices=devices) if checked else load(source, given)
        except ConfigError as error:
            words = {**self._adjusted, **self.flags}
            raise ConfigError(in_users_words(error.problems, words)) from None

    def imply(self, values: dict[str, str]) -> None:
        """Add values that follow from others, as if they had been typed first."""
        words = {f"{key}={value}": f"{key}={value}" for key, value in values.items()}
        self.flags = {**words, **self.flags}

    def adjust_ranks_of(self, stored: Config) -> None:
        """Let --nproc and --nnodes change the layout of a config that has all written out, and
        vice versa.

        A run folder and ``paceline config show`` write both, so that one of them alone would
        always contradict the other.
        """
        given = {text.partition("=")[0].strip(): text for text in (*self.flags, *self.overrides)}
        words = {key: self.flags.get(text, f"--set {text}") for key, text in given.items()}
        ranks = [words[key] for key in ("launch.nproc", "launch.nnodes") if key in words]
        if ranks and "layout" not in words and stored.layout != "auto":
            rest = str(Layout.smallest(stored.layout)).partition(",")[2]
            self._adjusted = {f"layout={rest or 'auto'}": ranks[0]}
        elif "layout" in words and "launch.nproc" not in words and stored.launch.nproc != "auto":
            self._adjusted = {"launch.nproc=auto": words["layout"]}

    def check_nodes(self, config: Config) -> None:
        """What ``paceline.config.check`` says of the machines, where it is not asked."""
        problems = [text for _, text in node_problems(config)]
        if problems:
            raise ConfigError(problems)
