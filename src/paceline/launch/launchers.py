"""Who starts processes, and which variables each of them sets: the one table of it.

``LAUNCHERS`` is in the order in which they are looked for. Whoever starts a process last comes
first: ``mpirun`` in a SLURM job starts its daemons by ``srun``, so that its ranks have the
variables of both, and those of ``paceline train`` and torchrun inherit whatever was there before.

Only the reading is done elsewhere (``environment.py``); what a row says is what is true of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

LAUNCHER_PID = "PACELINE_LAUNCHER_PID"

_UNSET = "Start the script with torchrun or `paceline train --script`, or unset these variables."


@dataclass(frozen=True)
class Launcher:
    """One row. Of several names for a value, the first that is set counts."""

    name: str
    marks: tuple[str, ...]
    """It started this process if all of these are set."""
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """What names the job, the same on all its ranks: a port is derived from it."""
    starts_one_process: bool = False
    """Each of its tasks is a machine's worth: the rank is the node, and there is one on each."""
    fix: str = _UNSET
    """What to do where its variables do not suffice."""
    export: str = "MASTER_ADDR={address} MASTER_PORT={port}"
    """How the address of rank 0 is given to all its ranks."""

    @property
    def sets_torchs_variables(self) -> bool:
        """Whether its variables are torch's own."""
        return self.rank == ("RANK",)

    def recognised(self, env: Mapping[str, str]) -> bool:
        """Whether it started this process."""
        return all(mark in env for mark in self.marks)


BY_HAND = Launcher(
    "RANK and WORLD_SIZE",
    (),
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    node=("GROUP_RANK",),
    nodes=("GROUP_WORLD_SIZE",),
    restarts=("TORCHELASTIC_RESTART_COUNT",),
)
"""Torch's variables without a launcher that is known: any of them is enough to be it."""
PACELINE = replace(BY_HAND, name="paceline", marks=(LAUNCHER_PID, "TORCHELASTIC_RUN_ID", "RANK"))
TORCHRUN = replace(BY_HAND, name="torchrun", marks=("TORCHELASTIC_RUN_ID", "RANK"))
RAY = replace(BY_HAND, name="Ray Train", marks=("RAY_RAYLET_PID", "RANK"), node=("NODE_RANK",))
KUBEFLOW = replace(
    BY_HAND,
    name="Kubeflow PyTorchJob",
    marks=("PET_NNODES", "RANK"),
    node=("PET_NODE_RANK",),
    nodes=("PET_NNODES",),
    fix="With several ranks in a pod, start them there: `torchrun train.py`, which reads PET_*.",
)

OPEN_MPI = Launcher(
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    # No node: OMPI_COMM_WORLD_NODE_RANK is the rank on it, over all jobs.
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    fix="Start the script with `mpirun -np 4 python train.py`, which sets OMPI_COMM_WORLD_*.",
    export="mpirun -x MASTER_ADDR={address} -x MASTER_PORT={port}",
)
HYDRA = Launcher(
    "MPICH (Hydra)",
    ("PMI_RANK", "MPI_LOCALRANKID"),
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID",),
    local_size=("MPI_LOCALNRANKS",),
    job=("PMI_JOBID",),
    fix="Start the script with `mpirun -np 4 python train.py`, which sets PMI_* and MPI_LOCAL*.",
    export="mpirun -genv MASTER_ADDR {address} -genv MASTER_PORT {port}",
)
SLURM = Launcher(
    "SLURM (srun)",
    ("SLURM_STEP_ID",),
    rank=("SLURM_PROCID",),
    # SLURM_NTASKS is the whole job's where srun was told to keep the environment as it is.
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    # The local size follows from SLURM_STEP_TASKS_PER_NODE; see environment.py.
    node=("SLURM_NODEID",),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    restarts=("SLURM_RESTART_COUNT",),
    fix="Start the script with `srun python train.py`, which sets SLURM_*, and pass them on "
    "(no --export=NONE) into a container.",
    export="MASTER_ADDR={address} MASTER_PORT={port} srun",
)
PMI = Launcher(
    "PMI",
    ("PMI_RANK",),
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("PMI_LOCAL_RANK",),
    local_size=("PMI_LOCAL_SIZE",),
    job=("PMI_JOBID",),
    fix="Start the script with mpirun, mpiexec or srun, which set PMI_RANK and PMI_SIZE; or set "
    "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE on every rank.",
)
PMIX = Launcher(
    "PMIx",
    ("PMIX_RANK",),
    rank=("PMIX_RANK",),
    size=(),
    job=("PMIX_NAMESPACE",),
    fix="PMIx has no variable for the number of ranks: set WORLD_SIZE, LOCAL_RANK and "
    "LOCAL_WORLD_SIZE on every rank, or start the script with mpirun or srun, which say it.",
)
KUBERNETES = Launcher(
    "Kubernetes indexed job",
    ("JOB_COMPLETION_INDEX",),
    rank=("JOB_COMPLETION_INDEX",),
    size=(),
    starts_one_process=True,
    fix="Set WORLD_SIZE to the number of pods in the manifest, and MASTER_ADDR and MASTER_PORT to "
    "those of pod 0; or, where every pod trains by itself, RANK=0 and WORLD_SIZE=1.",
)

LAUNCHERS = (
    PACELINE,
    TORCHRUN,
    RAY,
    KUBEFLOW,
    OPEN_MPI,
    HYDRA,
    SLURM,
    PMI,
    PMIX,
    KUBERNETES,
)
"""In the order in which they are looked for; ``BY_HAND`` is what is left."""

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MPI = (OPEN_MPI, HYDRA)
_NO_STEP = 0xFFFF0000
"""SLURM's numbers for what is no step of srun's: the batch script, an interactive shell, …"""


def torch_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Whose are torch's variables (``RANK``, …) in ``env``; ``None`` where there are none.

    ``MASTER_ADDR`` alone says nothing: clusters export it everywhere.
    """
    for launcher in LAUNCHERS:
        if launcher.sets_torchs_variables and launcher.recognised(env):
            return launcher
    return BY_HAND if any(name in env for name in _RANK_VARIABLES) else None


def task_launchers(env: Mapping[str, str]) -> list[Launcher]:
    """Who says, by variables of its own, that this process is one of its tasks; first the last."""
    found = [
        launcher
        for launcher in LAUNCHERS
        if not launcher.sets_torchs_variables and launcher.recognised(env)
    ]
    if SLURM in found and not in_slurm_step(env):
        found.remove(SLURM)
    if any(launcher in _MPI for launcher in found):
        # PMI's are Hydra's own; SLURM's may be those of the daemons that mpirun starts with srun;
        # and a pod may start ranks of its own.
        found = [launcher for launcher in found if launcher not in (SLURM, PMI, KUBERNETES)]
    return found


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this: a batch script has a rank, but is not one of the tasks."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _NO_STEP


def waiting_tasks(env: Mapping[str, str]) -> int:
    """How many tasks a SLURM job is to have that this process is in, but no task of; else 0.

    Those of a batch script, a shell of ``salloc``, a notebook in there: nobody has started them.
    """
    if "SLURM_JOB_ID" not in env or in_slurm_step(env):
        return 0
    # Without a number of tasks, srun starts one on each node.
    said = (env.get(name, "") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"))
    tasks = next((int(text) for text in said if text.isdecimal()), 1)
    return tasks if tasks > 1 else 0
