"""The sections about where a run is launched: one for each engine that ``launch.on`` may name."""

from __future__ import annotations

from pydantic import Field

from paceline.config.fields import Positive
from paceline.config.sections import Section
from paceline.config.slurm_fields import (
    OneLine,
    SetupLine,
    SlurmArray,
    SlurmConstraint,
    SlurmMemory,
    SlurmOption,
    SlurmTime,
    SlurmWord,
)

ENGINES = ("local", "ssh", "slurm", "kubernetes", "ray", "mpi")
"""What ``launch.on`` may name."""


class Ssh(Section):
    """Launching over SSH: one launcher on every host, by the ssh that the user has."""

    hosts: list[str] = Field(
        default=[],
        description="Hosts as ssh knows them, like user@node0; host:4 has 4 ranks.",
    )
    hostfile: str | None = Field(
        default=None,
        min_length=1,
        description="A file of hosts, one a line, as horovodrun's or mpirun's.",
    )


class Slurm(Section):
    """Launching by SLURM: a batch job with one launcher on every node."""

    partition: SlurmWord | None = Field(default=None, description="Partition.")
    account: SlurmWord | None = Field(default=None, description="Account that pays.")
    qos: SlurmWord | None = Field(default=None, description="Quality of service.")
    reservation: SlurmWord | None = Field(default=None, description="Reservation.")
    constraint: SlurmConstraint | None = Field(
        default=None, description="Features that the nodes must have, like 'a100&ib'."
    )
    time: SlurmTime | None = Field(
        default=None,
        description="Time limit: minutes, or [days-]hours:minutes:seconds like '1-12:00:00'; "
        "null: the partition's.",
    )
    gpus_per_node: Positive | None = Field(default=None, description="GPUs of every node.")
    gres: SlurmWord | None = Field(
        default=None, description="GPUs of a kind, like 'gpu:a100:4', in place of gpus_per_node."
    )
    cpus_per_node: Positive | None = Field(
        default=None, description="CPU cores of every node; null: one for each rank."
    )
    memory: SlurmMemory | None = Field(
        default=None, description="Memory of every node, like '64G'; '0': all of it."
    )
    exclusive: bool = Field(default=False, description="Share the nodes with no other job.")
    job_name: SlurmWord | None = Field(default=None, description="Name; null: the run's.")
    comment: OneLine | None = Field(default=None, description="Any words, kept with the job.")
    requeue: bool = Field(
        default=True,
        description="Go on by itself, in the queue again, after the time limit or a lost node.",
    )
    save_before: Positive = Field(
        default=120,
        description="Seconds before the time limit at which the run saves and leaves.",
    )
    array: SlurmArray | None = Field(
        default=None,
        description="One run for each number, like '0-3' or '0-9%2' (two at a time); {index} in "
        "values of --set is that number.",
    )
    extra: list[SlurmOption] = Field(
        default=[], description="Further options of sbatch, one each, like '--mail-type=END'."
    )
    setup: list[SetupLine] = Field(
        default=[],
        description="Lines of shell that run before the launchers, like 'module load cuda' or "
        "'source venv/bin/activate'. They are run as they stand.",
    )
    python: OneLine | None = Field(
        default=None, description="Python on the nodes, like 'python3'; null: this one."
    )


class Ray(Section):
    """Launching by Ray Train, which places the ranks."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="The cluster, like ray://head:10001 or auto; null: one on this machine.",
    )


class Mpi(Section):
    """Launching by mpirun, which starts the ranks."""

    hosts: list[str] = Field(default=[], description="Hosts; host:4 has 4 ranks.")
    hostfile: str | None = Field(
        default=None, min_length=1, description="A file of hosts, handed to mpirun."
    )
