"""Mistakes of starting in a job of several tasks: one process too few, or one run too many."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from paceline.errors import WorldError
from paceline.launch.launchers import KUBERNETES, task_launchers, torch_launcher, waiting_tasks
from paceline.launch.variable_reader import VariableReader


def check_not_left_alone(environ: Mapping[str, str] | None = None) -> None:
    """Refuse to run alone in a SLURM job of several tasks, none of which this process is.

    That is so in a batch script, a shell of ``salloc`` or a notebook there. To wait for the other
    tasks would be in vain, and to train without them is not what was asked for.
    """
    env = os.environ if environ is None else environ
    if not (tasks := waiting_tasks(env)):
        return
    job = env["SLURM_JOB_ID"]
    command = shlex.join(["srun", *(sys.orig_argv or ["python", "train.py"])])
    start = (
        f"In a notebook, start ranks with Trainer.fit(..., nproc={tasks})."
        if "ipykernel" in sys.modules
        else f"Start them with: {command}; or start ranks here, with `paceline train`."
    )
    raise WorldError(
        f"SLURM job {job} is to have {tasks} tasks, and this process is none of them: it was "
        f"started in the job's batch script or shell, without srun. {start} To train with this "
        "process alone, set RANK=0 and WORLD_SIZE=1."
    )


def started_by_tasks(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """The SLURM or MPI that started this process as one of several tasks, and how many.

    For launchers: each of those tasks would start a run of its own. ``None`` for the ranks of
    torchrun or ours, whose variables do not say that this is no rank's own doing.
    """
    env = os.environ if environ is None else environ
    if torch_launcher(env) is not None:
        return None
    for launcher in task_launchers(env):
        read = VariableReader(env, [launcher])
        if launcher is not KUBERNETES and read.name_of("size") is not None:
            size = read.number("size", minimum=1)
            return (launcher.name, size) if size > 1 else None
    return None
