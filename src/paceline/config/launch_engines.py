"""The sections about where a run is launched: one for each engine that ``launch.on`` may name."""

from __future__ import annotations

from pydantic import Field

from paceline.config.fields import Positive
from paceline.config.sections import Section

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

    partition: str | None = Field(default=None, min_length=1, description="Partition.")
    gpus_per_node: Positive | None = Field(default=None, description="GPUs of every node.")


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
