"""What ``paceline train`` was asked for: its flags, checked together, and the config they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.options import PLACES
from paceline.cli.train_usage import resume_problem, script_problem
from paceline.config import Config, load, load_checked
from paceline.config.checks import node_problems
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
    auto: bool = False
    """Go on with the run in ``run_dir`` if there is one, else start it (``--resume auto``)."""
    _adjusted: dict[str, str] = field(default_factory=dict)

    def check(self, on: str, layout: str | None) -> None:
        """Refuse what does not go together, all of it at once."""
        problems = []
        if on not in PLACES:
            problems.append(
                f"--on {on}: not available; this version starts ranks on: {', '.join(PLACES)}"
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
        for flag, key in (("--name", "name"), ("--tag", "tags")):
            if self.asks_for(key):
                problems.append(
                    f"{flag}: for configs only; name the folder of a script's run with --run-dir"
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
