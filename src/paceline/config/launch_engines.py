"""The sections about where a run is launched: one for each engine that ``launch.on`` may name."""

from __future__ import annotations

from typing import Literal

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
    config: str | None = Field(
        default=None, min_length=1, description="ssh's config file; null: its own."
    )
    options: list[str] = Field(
        default=[],
        description="Options as in ssh's config file, like 'IdentityFile=~/.ssh/cluster'.",
    )
    interactive: bool = Field(
        default=False,
        description="Let ssh ask for passwords, host by host, before the run starts; it then "
        "connects once and cannot connect again by itself.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Python on the hosts; null: the same path as here if it is there, else "
        "python3.",
    )
    setup: str | None = Field(
        default=None,
        min_length=1,
        description="Shell commands on every host before the launcher, like 'module load cuda'.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="The first host's name or address as the other hosts reach it; null: its "
        "HostName in ssh's config, or the name it has in the list.",
    )
    folder: str = Field(
        default="~/.paceline/ssh",
        min_length=1,
        description="A folder on the hosts, the same path on all of them: for what is copied, "
        "and for the run where the hosts do not see its folder.",
    )
    code: Literal["auto", "shared", "copy"] = Field(
        default="auto",
        description="Where the code is: the hosts see the same folder as this machine (shared), "
        "it is copied to them (copy), or whichever is found (auto).",
    )
    most_mib: Positive = Field(
        default=1024, description="The most MiB of code that are copied to a host."
    )
    linger: float = Field(
        default=60.0,
        ge=5,
        description="Seconds that a host goes on training without hearing from the command that "
        "started it.",
    )
    connect_timeout: Positive = Field(
        default=15, description="Seconds to wait for a connection to a host."
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
        description="The cluster, like ray://head:10001, head:6379 or auto; null: one on this "
        "machine, for this run.",
    )
    cpus_per_worker: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="CPUs that Ray reserves for each rank."
    )
    resources: dict[str, float] = Field(
        default={}, description="What else each rank needs, by the names that the cluster has."
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="PACK: on few nodes; SPREAD: over many; STRICT_PACK: on one node; "
        "STRICT_SPREAD: each rank on a node of its own.",
    )
    storage_path: str | None = Field(
        default=None,
        min_length=1,
        description="A folder or URL that Ray copies each checkpoint to; null: Ray's records are "
        "in the run's folder and refer to the checkpoints there.",
    )
    working_dir: str | None = Field(
        default=None,
        min_length=1,
        description="A folder with code that Ray ships to every worker, where ranks then run; "
        "null: all nodes see the code at the same path.",
    )


class Mpi(Section):
    """Launching by mpirun: one launcher on every host, which starts the ranks there."""

    hosts: list[str] = Field(default=[], description="Hosts; host:4 has 4 ranks.")
    hostfile: str | None = Field(
        default=None,
        min_length=1,
        description="A file of hosts, one a line, as mpirun's or horovodrun's.",
    )
    mpirun: str = Field(
        default="mpirun",
        min_length=1,
        description="The program: that of Open MPI, MPICH or Intel MPI, whichever is meant.",
    )
    port: int = Field(
        default=29400,
        ge=1,
        le=65535,
        description="The port on the first host where the launchers of several hosts meet.",
    )
    args: list[str] = Field(
        default=[],
        description="Further arguments of mpirun, one word each, like [--mca, btl_tcp_if_include, "
        "eth0].",
    )
