"""The interface of an engine, and what it is given to start."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config
from paceline.config.fields import node_range
from paceline.launch.engines.submission import Submission
from paceline.launch.run_folder import SUBMISSION

INDEX = "{index}"
"""Stands in values for the number of a run, where an engine starts several at once."""


def _not_shown(config: Config) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class ClusterJob:
    """A run to be started elsewhere: ``paceline train`` once on every machine.

    ``config`` was checked here, as far as that can be done without the machines. ``train`` are
    the arguments of ``paceline train`` that say what is trained, paths in them absolute;
    ``script_arguments`` go to a script, behind ``--``.
    """

    config: Config
    train: tuple[str, ...]
    run: Path
    """The run's folder, absolute; all machines are to see it where they share a disk."""
    folder: Path
    """Where the command was typed: relative names in a config count from here."""
    script_arguments: tuple[str, ...] = ()
    resume: bool = False
    """The run was there before, and goes on."""
    apply: bool = False
    """Hand over what would otherwise only be printed."""
    shown: Callable[[Config], AbstractContextManager[None]] = _not_shown
    """For an engine without a launcher of ours: shows and records the run, which has this config,
    from the events it writes during the block."""

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the most machines."""
        return node_range(self.config.launch.nnodes)

    @property
    def submission(self) -> Path:
        """The folder in the run's for what is handed over: script, manifest, record, output."""
        return self.run / SUBMISSION

    def launcher(
        self,
        *more: str,
        python: str = sys.executable,
        run: str | None = None,
        rdzv: str | None = None,
        secret_file: str | None = None,
        train: Sequence[str] | None = None,
    ) -> list[str]:
        """The command for one machine.

        It is safe to repeat: it starts the run, or goes on with it. ``rdzv`` is where the machines
        meet, ``more`` further arguments; ``train`` and ``run`` stand in for ``self.train`` and
        ``self.run`` where files lie elsewhere on that machine.
        """
        meet = () if rdzv is None else ("--rdzv", rdzv, "--nnodes", str(self.config.launch.nnodes))
        secret = () if secret_file is None else ("--secret-file", secret_file)
        run = str(self.run) if run is None else run
        folder = ("--resume", run) if self.resume else ("--run-dir", run, "--resume", "auto")
        after = ("--", *self.script_arguments) if self.script_arguments else ()
        what = self.train if train is None else train
        given = (*what, "--on", "local", *folder, *meet, *secret, *more, *after)
        return [python, "-m", "paceline", "train", *given]


class RunControl(abc.ABC):
    """Asking about a run that was started, and ending it: the same words for every engine."""

    @abc.abstractmethod
    def status(self, submission: Submission) -> str:
        """The state of the run in the engine's own words, like ``PENDING (Resources)``."""

    @abc.abstractmethod
    def logs(self, submission: Submission, *, follow: bool) -> int:
        """Print the run's output, also what is yet to come with ``follow``; an exit status."""

    @abc.abstractmethod
    def cancel(self, submission: Submission) -> str:
        """End the run, giving it time to save; what was done, in words."""


class LaunchEngine(RunControl):
    """Starts runs elsewhere.

    ``start`` either follows the run to its end (over SSH, say) or hands it over (to SLURM, say)
    and comes back at once. Whatever it starts, it has saved a ``Submission`` of.
    """

    @abc.abstractmethod
    def problems(self, config: Config) -> list[str]:
        """Why ``config`` cannot be started this way, one message each; nothing is started."""

    def implied(self, config: Config) -> dict[str, str]:
        """Keys of the config that follow from the engine's own section, with their values.

        Like ``launch.nnodes`` from a list of hosts; asked once ``problems`` found none.
        """
        return {}

    @abc.abstractmethod
    def gpus_per_machine(self, config: Config) -> int:
        """How many GPUs every machine will have, as far as is known here; 0 where it is not."""

    def index_of_sample(self, config: Config) -> str | None:
        """For an engine that starts several runs at once: the number of one of them.

        By it values are checked that hold ``{index}`` for that number; ``config`` is without them.
        """
        return None

    @abc.abstractmethod
    def plan(self, job: ClusterJob) -> str:
        """What ``start`` would hand over, as text: a script, a manifest, commands."""

    @abc.abstractmethod
    def start(self, job: ClusterJob) -> int:
        """Start the run; the exit status of the command."""
