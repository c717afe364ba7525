"""The sections about a run: what it saves, where its ranks run, who listens to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

import paceline.config.demo as demo
from paceline.config.fields import (
    CheckpointURL,
    EnvironmentVariables,
    Nodes,
    Positive,
    StorageOptions,
    TrackingURI,
)
from paceline.config.launch_engines import Mpi, Ray, Slurm, Ssh
from paceline.config.launch_kubernetes import Kubernetes
from paceline.config.sections import Section, keys_of, switch
from paceline.config.target_sections import TrackerTarget
from paceline.credentials import Secret
from paceline.options import Checkpointing, TrainerOptions

_saving, _trainer = keys_of(Checkpointing), keys_of(TrainerOptions)


class Checkpoint(Section):
    """When state is saved and what is kept."""

    every: int | None = _saving("every", default=demo.CHECKPOINT_EVERY)
    keep: int = _saving("keep")
    best: str | None = _saving("best", min_length=1)
    mode: Literal["min", "max"] = _saving("mode", default="min")
    save_at_end: bool = _saving("save_at_end")
    every_minutes: float | None = _saving("every_minutes")
    every_epoch: bool = _saving("every_epoch")
    every_epochs: int | None = _saving("every_epochs")
    keep_best: int = _saving("keep_best")
    keep_every: int | None = _saving("keep_every")
    asynchronous: bool = _saving("asynchronous")
    on_failure: Literal["warn", "stop"] = _saving("on_failure")
    retry_seconds: float = _saving("retry_seconds")
    where: CheckpointURL | None = _saving("where", min_length=1)
    storage: StorageOptions = _saving("storage", default={})
    memory_every: int | None = _saving("memory_every")
    start_from: CheckpointURL | None = _saving("start_from", min_length=1)
    digest: Literal["xxh3", "blake2b"] = _saving("digest")
    digest_key: Secret | None = _saving("digest_key")

    @property
    def epochs_between(self) -> int | None:
        """After how many epochs to save; ``None``: epochs do not count."""
        return 1 if self.every_epoch else self.every_epochs

    def options(self) -> Checkpointing:
        """For the trainer."""
        return Checkpointing(**self.model_dump())


class Launch(Section):
    """Where the ranks run."""

    on: Literal["local", "ssh", "slurm", "kubernetes", "ray", "mpi"] = Field(
        default="local",
        description="What starts the ranks: this machine, or the engine of a cluster.",
    )
    nproc: Positive | Literal["auto"] = Field(
        default="auto",
        description="Number of ranks; auto: as many as the layout says, else one per GPU, "
        "else 2 on a machine without GPUs.",
    )
    nnodes: Nodes = Field(
        default=1,
        description="Number of machines, or least:most like '1:4': the run goes on with those "
        "that are there.",
    )
    rdzv: str | None = Field(
        default=None,
        min_length=1,
        description="Where machines meet, HOST:PORT; further ones after commas stand in for the "
        "first. Needed for more than one machine.",
    )
    secret: Secret | None = Field(
        default=None,
        description="Where the secret that the machines share is, file:/path or env:NAME: only who "
        "has it may take part. null: PACELINE_SECRET_FILE or PACELINE_SECRET, if set.",
    )
    max_restarts: int = Field(
        default=3, ge=0, description="How often a run that failed is started again by itself."
    )
    max_preemptions: int | None = Field(
        default=None,
        ge=0,
        description="How often machines may be taken from the run; null: as often as they are.",
    )
    backoff: float = Field(
        default=1.0,
        ge=0,
        description="Seconds before the second restart in a row; doubles with each further one.",
    )
    shrink: Literal["allow", "wait"] = Field(
        default="allow",
        description="With fewer ranks than the layout has places: train with fewer data-parallel "
        "ranks, or wait for machines.",
    )
    node_timeout: float = Field(
        default=10.0, gt=1, description="Seconds without a sign of life until a machine is lost."
    )
    rejoin_timeout: float = Field(
        default=600.0, gt=0, description="Seconds to wait for enough machines to go on with."
    )
    standby: bool = Field(
        default=True,
        description="Keep started processes ready beside the ranks, so that a restart is quick.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is a GPU, else cpu."
    )
    share_gpu: bool = Field(
        default=False,
        description="For tests: more ranks than this machine has GPUs share them over NCCL, each "
        "passing for a host of its own. Slow.",
    )
    grace: float = Field(
        default=15.0,
        gt=0,
        description="Seconds the ranks have to save and leave after Ctrl-C or SIGTERM.",
    )
    timeout: float = _trainer("timeout", default=600.0)
    env: EnvironmentVariables = Field(
        default={},
        description="Environment variables of every rank, like NCCL_SOCKET_IFNAME: ib0. They are "
        "saved with the run: no place for passwords.",
    )
    ssh: Ssh = Field(default=Ssh(), description="For on: ssh.")
    slurm: Slurm = Field(default=Slurm(), description="For on: slurm.")
    kubernetes: Kubernetes = Field(default=Kubernetes(), description="For on: kubernetes.")
    ray: Ray = Field(default=Ray(), description="For on: ray.")
    mpi: Mpi = Field(default=Mpi(), description="For on: mpi.")


class Hangs(Section):
    """What is done about a run that does not move; see docs/guides/hangs.md."""

    after: float | None = Field(
        default=60.0,
        gt=0,
        description="Report a run that has not moved for this many seconds (or for three times "
        "its longest step, where that is more); null: never.",
    )
    action: Literal["restart", "stop", "wait"] = Field(
        default="restart",
        description="What to do when it has not moved for twice that long either.",
    )


class Mlflow(Section):
    """Where MLflow keeps the run."""

    uri: TrackingURI | None = Field(
        default=None,
        min_length=1,
        description="Tracking URI, or env:NAME for a variable that holds it; null: "
        "MLFLOW_TRACKING_URI, else a sqlite file in track.run_dir.",
    )
    experiment: str = Field(default="paceline", min_length=1, description="Experiment name.")


class Wandb(Section):
    """Where Weights & Biases keeps the run. The key is WANDB_API_KEY, or that of wandb login."""

    project: str = Field(default="paceline", min_length=1, description="Project name.")
    entity: str | None = Field(
        default=None, min_length=1, description="User or team; null: your default one."
    )
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="offline: write files into the run's folder, for wandb sync to send later.",
    )


class Comet(Section):
    """Where Comet keeps the run. The key is COMET_API_KEY, or that of comet login."""

    project: str = Field(default="paceline", min_length=1, description="Project name.")
    workspace: str | None = Field(
        default=None, min_length=1, description="Workspace; null: your default one."
    )
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="offline: write an archive into the run's folder, for comet upload to send "
        "later.",
    )


class Track(Section):
    """Who listens to the run."""

    progress: bool = _trainer("progress")
    memory: bool = _trainer("measure_memory")
    split_every: int | None = _trainer("split_every")
    tensorboard: bool = Field(default=False, description="Write TensorBoard files.")
    mlflow: Annotated[Mlflow | None, BeforeValidator(switch)] = Field(
        default=None, description="Log to MLflow: true, or a mapping of uri and experiment."
    )
    csv: bool = Field(
        default=False, description="Write every number to metrics.csv in the run's folder."
    )
    wandb: Annotated[Wandb | None, BeforeValidator(switch)] = Field(
        default=None,
        description="Log to Weights & Biases: true, or a mapping of project, entity and mode.",
    )
    comet: Annotated[Comet | None, BeforeValidator(switch)] = Field(
        default=None, description="Log to Comet: true, or a mapping of project, workspace and mode."
    )
    trackers: list[TrackerTarget] = _trainer("trackers", default=[], note="Each is an import path.")
    run_dir: str = Field(
        default="runs", min_length=1, description="Folder in which each run gets its own folder."
    )
