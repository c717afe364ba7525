"""What starts a run elsewhere: one file for each engine that ``--on`` names, one small interface.

Every engine does the same thing by its own means: it has ``paceline train`` started once on every
machine (``ClusterJob.launcher``), where the launchers form a world as they would if a person had
started them. So a run is the same run on every engine. ``base`` is the interface, ``submission``
what is kept of a run that was handed over, ``local`` answers for runs of this machine.
"""

from __future__ import annotations

import importlib

from paceline.errors import ConfigError
from paceline.launch.engines.base import INDEX, ClusterJob, LaunchEngine, RunControl
from paceline.launch.engines.submission import Submission, read_submission

__all__ = [
    "INDEX",
    "ClusterJob",
    "LaunchEngine",
    "RunControl",
    "Submission",
    "control_of",
    "engine_named",
]

_ENGINES = {
    "ssh": "paceline.launch.engines.ssh:SshEngine",
    "slurm": "paceline.launch.engines.slurm:SlurmEngine",
    "kubernetes": "paceline.launch.engines.kubernetes:KubernetesEngine",
    "ray": "paceline.launch.engines.ray:RayEngine",
    "mpi": "paceline.launch.engines.mpi:MpiEngine",
}
"""By the name that ``launch.on`` has for it: the module and the class."""


def engine_named(name: str) -> LaunchEngine:
    """The engine that ``launch.on`` names; its module is imported here, and no other's."""
    if name not in _ENGINES:
        raise ConfigError(f"launch.on={name!r}: there is no such engine; use {_listed()}")
    module, _, kind = _ENGINES[name].partition(":")
    engine: LaunchEngine = getattr(importlib.import_module(module), kind)()
    return engine


def control_of(run: str) -> tuple[RunControl, Submission]:
    """Who answers for the run in this folder, and by which name he knows it."""
    from paceline.launch.engines.local import LocalRuns, StrangersRuns

    submission = read_submission(run)
    if submission is None:
        return LocalRuns(), LocalRuns.submission_of(run)
    if submission.engine not in _ENGINES or not submission.is_own():
        return StrangersRuns(), submission
    return engine_named(submission.engine), submission


def _listed() -> str:
    return ", ".join(("local", *_ENGINES))
