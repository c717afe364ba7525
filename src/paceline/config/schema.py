"""What a config may say: one class per section, every key with its meaning and its default.

The defaults together are the demo (see ``demo.py``). Three of them depend on another key, because
the demo's value makes no sense beside a choice of the user's own:

- ``args`` are the demo's unless the section names its own ``target`` (or optimizer ``name``);
- ``loss`` is the demo's only for the demo's model, else null;
- ``train.steps`` is null once ``train.epochs`` is given.

Nothing is coerced: ``"3"`` is not a number, ``"yes"`` is not true, and an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from paceline.config import demo
from paceline.config.fields import (
    OPTIMIZERS,
    Args,
    CheckpointURL,
    ImportPath,
    LayoutText,
    Nodes,
    OptimizerName,
    Positive,
    RunName,
    StorageOptions,
    TrackingURI,
    args_of_default,
)
from paceline.config.secrets import Secret
from paceline.config.sections import Section
from paceline.config.sources import Sources
from paceline.config.wire import CompressSection, LocalStepsSection, ReductionSection
from paceline.layout.batch import BatchSizes
from paceline.layout.schedules import SCHEDULES


class Target(Section):
    """Something to import and call with keyword arguments."""

    target: ImportPath = Field(description="Import path, like 'package.module:Name'.")
    args: Args = Field(default={}, description="Keyword arguments it is called with.")


class Model(Section):
    """The model to train."""

    target: ImportPath = Field(
        default=demo.MODEL,
        description="Import path of the model class, or of a function that returns the model.",
    )
    args: Args = Field(
        default=demo.MODEL_ARGS,
        description="Keyword arguments of the target. Without a target they adjust the demo's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _demo_args(cls, data: Any) -> Any:
        return args_of_default(data, "target", demo.MODEL_ARGS)


class Data(Section):
    """The data to train and to validate on, and how it is read."""

    target: ImportPath = Field(
        default=demo.DATA,
        description="Import path of a dataset class, or of a function that returns a dataset "
        "or a pair (train, val).",
    )
    args: Args = Field(
        default=demo.DATA_ARGS,
        description="Keyword arguments of the target. Without a target they adjust the demo's.",
    )
    val: Target | None = Field(
        default=None, description="The validation dataset, when the target does not return one."
    )
    workers: int = Field(
        default=0, ge=0, description="Loader processes per rank; 0 reads in the rank itself."
    )
    shuffle: bool = Field(default=True, description="Draw the training samples in random order.")
    drop_last: bool = Field(
        default=False, description="Leave out the last, short batch of an epoch."
    )
    pin_memory: bool | None = Field(
        default=None, description="Load into page-locked memory; null: when training on a GPU."
    )
    sharded_by_rank: bool = Field(
        default=False,
        description="The data is a stream that gives each data-parallel rank samples of its own.",
    )
    compare: bool = Field(
        default=True, description="Ranks compare what they read, and stop where it differs."
    )

    @model_validator(mode="before")
    @classmethod
    def _demo_args(cls, data: Any) -> Any:
        return args_of_default(data, "target", demo.DATA_ARGS)


class Optimizer(Section):
    """How parameters are updated."""

    name: OptimizerName = Field(
        default="adamw",
        description=f"One of {', '.join(OPTIMIZERS)}, or an import path like "
        "'package.module:Name'.",
    )
    lr: float = Field(
        default=demo.LR, gt=0, description="Learning rate, before schedule.lr_scaling."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay; null: the optimizer's own default."
    )
    args: Args = Field(
        default={}, description="Further keyword arguments, like betas: [0.9, 0.95]."
    )

    @property
    def target(self) -> str:
        """Import path of the optimizer class."""
        return OPTIMIZERS.get(self.name, self.name)


class Schedule(Section):
    """How the learning rate goes over the run, and how it follows the batch size."""

    name: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="The shape after warmup, down to min_ratio at the end."
    )
    warmup_steps: int = Field(
        default=demo.WARMUP_STEPS, ge=0, description="Steps of linear rise to the full rate."
    )
    min_ratio: float = Field(
        default=demo.MIN_RATIO,
        ge=0,
        le=1,
        description="Learning rate at the end as a fraction of the full one (linear, cosine).",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Multiply optimizer.lr by batch.global_batch / reference_batch (linear) "
        "or by its square root (sqrt).",
    )
    reference_batch: Positive | None = Field(
        default=None, description="The global batch optimizer.lr was chosen for."
    )


class Batch(Section):
    """How many samples make a step, and how many go through the model at once."""

    global_batch: Positive = Field(
        default=demo.GLOBAL_BATCH, description="Samples per optimizer step, over all ranks."
    )
    microbatch: Positive | None = Field(
        default=None,
        description="Samples per forward pass on one rank; gradients accumulate over as many "
        "passes as the rank's share needs. null: the whole share at once.",
    )
    per_device_batch: Positive | None = Field(
        default=None,
        description="Instead of global_batch: samples per forward pass on one rank. global_batch "
        "is then per_device_batch × data-parallel ranks × accumulate.",
    )
    accumulate: Positive | None = Field(
        default=None, description="Forward passes whose gradients make one step, on each rank."
    )

    _follows_ranks: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _without_global(cls, data: Any, handler: ModelWrapValidatorHandler[Batch]) -> Batch:
        """Without a global batch of its own it is, until the ranks are known, that of one rank."""
        given: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
        passes: Any = given.get("accumulate") or 1
        each: Any = given.get("per_device_batch")
        if each is None and given.get("accumulate") is not None:
            each = given.get("microbatch")
        follows = not given.get("global_batch") and type(each) is int and type(passes) is int
        made = handler({**given, "global_batch": max(each * passes, 1)} if follows else data)
        made._follows_ranks = made._follows_ranks or follows
        return made

    @property
    def sizes(self) -> BatchSizes:
        """What was said of the batch; ``sizes.on(ranks)`` is what it comes to."""
        total = None if self._follows_ranks else self.global_batch
        return BatchSizes(total, self.per_device_batch, self.accumulate, self.microbatch)

    def on(self, ranks: int) -> Batch:
        """The batch with its global size, on so many data-parallel ranks."""
        sizes = self.sizes.on(ranks)
        return Batch(global_batch=sizes.global_batch or 1, microbatch=sizes.microbatch)


class Sharding(Section):
    """How ``zero`` shards a model; see docs/guides/sharding.md."""

    units: str | list[str] | None = Field(
        default=None,
        description="Name patterns of the modules that are gathered as a whole. null: the model's "
        "repeated blocks.",
    )
    reshard: bool | Positive | None = Field(
        default=None,
        description="With zero=3: let go of gathered parameters after the forward pass. null: yes.",
    )
    dtype: Literal["bf16", "fp16"] | None = Field(
        default=None,
        description="Gather and compute parameters in this format; the optimizer keeps fp32 "
        "masters, gradients are reduced in fp32.",
    )
    offload: Literal["parameters", "optimizer"] | None = Field(
        default=None, description="What lives in the CPU's memory."
    )


class TensorSection(Section):
    """How ``tp`` splits layers; see docs/guides/tensor.md."""

    plan: Literal["auto"] | dict[str, str] = Field(
        default="auto",
        description="auto, or a mapping from name patterns to roles such as column and row.",
    )
    sequence: bool = Field(
        default=False, description="Split the sequence between the split layers, too."
    )


class PipelineSection(Section):
    """How ``pp`` cuts a model and runs it; see docs/guides/pipeline.md."""

    schedule: Literal[SCHEDULES] = Field(  # type: ignore[valid-type]
        default="1f1b", description="In which order stages run microbatches."
    )
    cuts: list[str] | None = Field(
        default=None, description="Modules that start a new stage. null: cut by balance."
    )
    balance: Literal["parameters", "flops", "time"] = Field(
        default="parameters", description="What the stages are to have equally much of."
    )
    stages_per_rank: Positive | None = Field(
        default=None, description="Stages on each rank. null: what the schedule is made for."
    )
    microbatches: Positive | None = Field(
        default=None, description="Microbatches a step at least. null: what the schedule needs."
    )


class Train(Section):
    """How long to train, when to evaluate, and what to do with odd gradients."""

    steps: Positive | None = Field(
        default=demo.STEPS, description="Optimizer steps to train for; give this or epochs."
    )
    epochs: Positive | None = Field(
        default=None, description="Passes over the training data; give this or steps."
    )
    eval_every: Positive | None = Field(
        default=None,
        description="Evaluate every this many steps; null: after each epoch and at the end.",
    )
    eval_batches: Positive | None = Field(
        default=None, description="Batches per evaluation; null: the whole validation set."
    )
    clip_norm: float | None = Field(
        default=demo.CLIP_NORM, gt=0, description="Clip the norm of the gradient to this."
    )
    clip_value: float | None = Field(
        default=None, gt=0, description="Clip each element of the gradient to this."
    )
    nonfinite: Literal["stop", "skip", "ignore"] = Field(
        default="stop",
        description="On NaN or Inf in loss or gradients: stop the run, skip the step, or ignore.",
    )
    sync_batchnorm: bool = Field(
        default=False, description="Batch-norm statistics over all ranks instead of each alone."
    )

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_default_steps(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("epochs") is not None and "steps" not in data:
            return {**data, "steps": None}
        return data


class Checkpoint(Section):
    """When state is saved and what is kept."""

    every: Positive | None = Field(
        default=demo.CHECKPOINT_EVERY,
        description="Save every this many steps; null: only at the end.",
    )
    keep: Positive = Field(default=2, description="How many of the latest checkpoints to keep.")
    best: str | None = Field(
        default=None,
        min_length=1,
        description="Also keep the best by this validation metric, like 'loss'.",
    )
    mode: Literal["min", "max"] = Field(
        default="min", description="Whether a smaller or a larger value of best is better."
    )
    save_at_end: bool = Field(default=True, description="Save when the run ends.")
    every_minutes: float | None = Field(
        default=None, gt=0, description="Save when this many minutes have passed since the last."
    )
    every_epoch: bool = Field(default=False, description="Save at the end of each epoch.")
    keep_best: Positive = Field(
        default=1, description="How many of the best to keep, where best is given."
    )
    keep_every: Positive | None = Field(
        default=None, description="Keep those whose step is a multiple of this for good."
    )
    asynchronous: bool = Field(
        default=True, description="Write while training goes on; it waits for a copy alone."
    )
    on_failure: Literal["warn", "stop"] = Field(
        default="warn", description="What a save that fails does to the run."
    )
    retry_seconds: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="For how long the last save is tried again where it fails, to make room.",
    )
    where: CheckpointURL | None = Field(
        default=None,
        min_length=1,
        description="A folder or a URL such as s3://bucket/run; null: checkpoints/ in the run's "
        "folder.",
    )
    storage: StorageOptions = Field(
        default_factory=dict,
        description="Options for that URL's file system, as fsspec takes; credentials as env:NAME "
        "or file:/path.",
    )
    memory_every: Positive | None = Field(
        default=None,
        description="Keep a copy in memory that outlives a crash, every this many steps.",
    )
    start_from: CheckpointURL | None = Field(
        default=None,
        min_length=1,
        description="Begin with the weights of this checkpoint, run or URL.",
    )
    digest: Literal["xxh3", "blake2b"] = Field(
        default="xxh3",
        description="How bytes are hashed: xxh3 finds damage, blake2b is a cryptographic hash.",
    )
    digest_key: Secret | None = Field(
        default=None,
        description="With blake2b: the key to write checkpoints with, and to require of those that "
        "are read, as env:NAME or file:/path.",
    )


class Launch(Section):
    """Where the ranks run."""

    on: Literal["local"] = Field(default="local", description="What starts the ranks.")
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
    grace: float = Field(
        default=15.0,
        gt=0,
        description="Seconds the ranks have to save and leave after Ctrl-C or SIGTERM.",
    )
    timeout: float = Field(
        default=600.0, gt=0, description="Seconds a rank waits for the others before giving up."
    )


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


def _mlflow(value: Any) -> Any:
    """``true`` is MLflow with its defaults, ``false`` is none."""
    return ({} if value else None) if isinstance(value, bool) else value


class Track(Section):
    """Who listens to the run."""

    progress: bool = Field(default=True, description="Progress bar, or lines off a terminal.")
    memory: bool = Field(
        default=False, description="Measure the second step: the bytes on each rank, as an event."
    )
    split_every: Positive | None = Field(
        default=50,
        description="Every this many steps: where each rank's time went, and who is slow, as "
        "events; null: never.",
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard files.")
    mlflow: Annotated[Mlflow | None, BeforeValidator(_mlflow)] = Field(
        default=None, description="Log to MLflow: true, or a mapping of uri and experiment."
    )
    run_dir: str = Field(
        default="runs", min_length=1, description="Folder in which each run gets its own folder."
    )


class Config(Section):
    """A whole run. ``Config()`` is the demo."""

    name: RunName = Field(default="run", description="Name of the run and of its folder.")
    seed: int = Field(
        default=0, ge=0, le=2**32 - 1, description="Decides weights, data order and dropout."
    )
    code: list[str] | None = Field(
        default=None,
        description="Folders in which the modules of targets are looked for first. null: the "
        "folder of this file; in either case the current folder comes next.",
    )
    model: Model = Field(default=Model(), description="The model to train.")
    loss: Target | None = Field(
        default=Target(target=demo.LOSS),
        description="A function loss(output, target), or a class to build one. null: the model "
        "returns its own loss. Left out: the demo's loss for the demo's model, else null.",
    )
    data: Data = Field(default=Data(), description="The data to train and to validate on.")
    optimizer: Optimizer = Field(default=Optimizer(), description="How parameters are updated.")
    schedule: Schedule = Field(default=Schedule(), description="The learning rate over the run.")
    batch: Batch = Field(default=Batch(), description="Samples per step and per forward pass.")
    train: Train = Field(default=Train(), description="How long to train, when to evaluate.")
    layout: LayoutText = Field(
        default="auto",
        description="How work is spread over the ranks, like 'dp=2' or 'dp=2,zero=3,tp=2'; auto: "
        "data-parallel over all of them.",
    )
    sharding: Sharding = Field(default=Sharding(), description="How zero shards the model.")
    tensor: TensorSection = Field(default=TensorSection(), description="How tp splits layers.")
    pipeline: PipelineSection = Field(
        default=PipelineSection(), description="How pp cuts and runs the model."
    )
    compress: CompressSection = Field(
        default=CompressSection(), description="In which form gradients travel between ranks."
    )
    local_steps: LocalStepsSection = Field(
        default=LocalStepsSection(), description="Replicas that step alone between meetings."
    )
    reduction: ReductionSection = Field(
        default=ReductionSection(), description="How gradients are summed over the ranks."
    )
    device_map: Literal["auto"] | dict[str, str] | None = Field(
        default=None,
        description="Put parts of the model on several devices of one process: names to devices, "
        "or auto.",
    )
    checkpoint_activations: Literal["full", "selective"] | Positive | None = Field(
        default=None,
        description="Recompute activations in the backward pass: of every block (full), of every "
        "n-th (a number), or of all but the costly operators (selective).",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32", description="Number format of the forward and backward pass."
    )
    initial_weights: Literal["rank0", "own"] = Field(
        default="rank0",
        description="What ranks start from: the model that rank 0 has built, or each its own.",
    )
    compile: bool = Field(default=False, description="Compile the model with torch.compile.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="What is saved and kept.")
    launch: Launch = Field(default=Launch(), description="Where the ranks run.")
    hangs: Hangs = Field(default=Hangs(), description="What is done about a run that stands still.")
    track: Track = Field(default=Track(), description="Who listens to the run.")

    _sources: Sources = PrivateAttr(default_factory=Sources)

    def __eq__(self, other: object) -> bool:
        # Where the values were written (_sources) is no part of what they are.
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    @model_validator(mode="before")
    @classmethod
    def _loss_of_default_model(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "loss" in data:
            return data
        model = data.get("model")
        target = model.get("target", demo.MODEL) if isinstance(model, Mapping) else demo.MODEL
        if isinstance(model, Model):
            target = model.target
        return data if target == demo.MODEL else {**data, "loss": None}
