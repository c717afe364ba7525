"""The sections about what is trained: model, data, optimizer, schedule, batch and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

import paceline.config.demo as demo
from paceline.config.fields import (
    OPTIMIZERS,
    Args,
    ImportPath,
    OptimizerName,
    Positive,
    ScheduleName,
    args_of_default,
)
from paceline.config.sections import Section, keys_of
from paceline.config.target_sections import CollateTarget, Target
from paceline.layout.batch import BatchSizes
from paceline.options import DataOptions, EngineOptions, Evaluation, TrainerOptions

_engine, _trainer = keys_of(EngineOptions), keys_of(TrainerOptions)
_data, _evaluation = keys_of(DataOptions), keys_of(Evaluation)


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
    workers: int = _data("workers")
    shuffle: bool = _data("shuffle", default=True)
    drop_last: bool = _data("drop_last")
    pin_memory: bool | None = _data("pin_memory")
    collate_fn: CollateTarget | None = _data(
        "collate_fn", note="The import path of a function, or of a class to build one."
    )
    sharded_by_rank: bool = _data("sharded_by_rank")
    compare: bool = _data("compare")

    @model_validator(mode="before")
    @classmethod
    def _demo_args(cls, data: Any) -> Any:
        return args_of_default(data, "target", demo.DATA_ARGS)

    def options(self, collate_fn: Callable[..., Any] | None = None) -> DataOptions:
        """For the trainer, with what ``collate_fn`` names.

        A stream keeps its own order, so that true stands for the default.
        """
        given = self.model_dump(exclude={"target", "args", "val", "collate_fn"})
        shuffle = None if self.shuffle else False
        return DataOptions(**{**given, "shuffle": shuffle, "collate_fn": collate_fn})


class ParameterGroup(Section):
    """Parameters that are updated with settings of their own."""

    match: str | list[str] = Field(
        description="A pattern of names of parameters, like 'backbone.*' or '*.bias', or a list "
        "of them. A parameter belongs to the first group that it matches."
    )
    lr: float | None = Field(
        default=None, gt=0, description="Learning rate of the group; null: optimizer.lr."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay of the group; null: as without the group."
    )
    args: Args = Field(default={}, description="Further arguments of the optimizer for this group.")


class Optimizer(Section):
    """How parameters are updated."""

    name: OptimizerName = Field(
        default="adamw",
        description=f"One of {', '.join(OPTIMIZERS)}, or an import path like "
        "'package.module:Name'.",
    )
    lr: float = Field(
        default=demo.LR,
        gt=0,
        description="Learning rate, before schedule.lr_scaling. Left out in a config with a model "
        "or data of its own: torch's default for the optimizer.",
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay; null: the optimizer's own default."
    )
    args: Args = Field(
        default={}, description="Further keyword arguments, like betas: [0.9, 0.95]."
    )
    decay: Literal["all", "weights"] = Field(
        default="all",
        description="Which parameters weight decay applies to: all, or weights: none for biases, "
        "the parameters of norms and others with fewer than two dimensions.",
    )
    groups: list[ParameterGroup] = Field(
        default=[], description="Parameters with a learning rate or weight decay of their own."
    )

    @property
    def target(self) -> str:
        """Import path of the optimizer class."""
        return OPTIMIZERS.get(self.name, self.name)


class Schedule(Section):
    """How the learning rate goes over the run, and how it follows the batch size."""

    name: ScheduleName = Field(
        default="cosine",
        description="The shape after warmup: constant, or linear or cosine down to min_ratio at "
        "the end; or one of torch's, like StepLR; or an import path of a scheduler class or of a "
        "function from the step to a factor. Left out in a config with a model or data of its own: "
        "constant.",
    )
    args: Args = Field(
        default={},
        description="Keyword arguments of one of torch's schedulers, or of an import path.",
    )
    warmup_steps: int = Field(
        default=demo.WARMUP_STEPS,
        ge=0,
        description="Steps of linear rise to the full rate. "
        "Left out in a config with a model or data of its own: 0.",
    )
    warmup_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Instead of warmup_steps: epochs of linear rise to the full rate.",
    )
    every: Literal["step", "epoch"] | None = Field(
        default=None,
        description="What one of torch's schedulers, or one of an import path, counts: step, it "
        "is stepped after each optimizer step, or epoch. Left out, as in configs of earlier "
        "versions: step, and the run says so.",
    )
    metric: str | None = Field(
        default=None,
        min_length=1,
        description="What ReduceLROnPlateau goes by after each evaluation: a validation metric, "
        "such as loss.",
    )
    min_ratio: float = Field(
        default=demo.MIN_RATIO,
        ge=0,
        le=1,
        description="Learning rate at the end as a fraction of the full one (linear, cosine). Left "
        "out in a config with a model or data of its own: 0.",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Multiply optimizer.lr by batch.global_batch / reference_batch (linear) "
        "or by its square root (sqrt).",
    )
    reference_batch: Positive | None = Field(
        default=None, description="The global batch optimizer.lr was chosen for."
    )

    @model_validator(mode="before")
    @classmethod
    def _no_default_steps_of_warmup(cls, data: Any) -> Any:
        """The demo's warm-up in steps is for schedules that count steps."""
        if not isinstance(data, Mapping) or "warmup_steps" in data:
            return data
        counts_others = data.get("every") == "epoch" or data.get("name") == "ReduceLROnPlateau"
        in_epochs = data.get("warmup_epochs") is not None
        return {**data, "warmup_steps": 0} if counts_others or in_epochs else data


class Batch(Section):
    """How many samples make a step, and how many go through the model at once."""

    global_batch: int = _trainer("global_batch", default=demo.GLOBAL_BATCH)
    microbatch: int | None = _engine("microbatch")
    per_device_batch: int | None = _trainer("per_device_batch")
    accumulate: int | None = _trainer("accumulate")

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


class Train(Section):
    """How long to train, when to evaluate, and what to do with odd gradients."""

    steps: Positive | None = Field(
        default=demo.STEPS,
        description="Optimizer steps to train for; give this or epochs. A config with a model or "
        "data of its own must name one of them.",
    )
    epochs: Positive | None = Field(
        default=None, description="Passes over the training data; give this or steps."
    )
    eval_every: int | None = _evaluation("every")
    eval_batches: int | None = _evaluation("batches")
    clip_norm: float | None = _engine(
        "clip_norm",
        default=demo.CLIP_NORM,
        note="Left out in a config with a model or data of its own: null.",
    )
    clip_value: float | None = _engine("clip_value")
    nonfinite: Literal["stop", "skip", "ignore"] = _engine("nonfinite")
    sync_batchnorm: bool = _engine("sync_batchnorm")
    freeze: str | list[str] | None = _engine("freeze")
    unfreeze_at: dict[str, Positive] | None = _engine("unfreeze_at")

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_default_steps(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("epochs") is not None and "steps" not in data:
            return {**data, "steps": None}
        return data

    def evaluation(self) -> Evaluation:
        """For the trainer."""
        return Evaluation(every=self.eval_every, batches=self.eval_batches)


class EarlyStoppingSection(Section):
    """When a run that no longer improves is ended; see paceline.EarlyStopping."""

    metric: str = Field(default="loss", min_length=1, description="The validation metric to watch.")
    patience: Positive = Field(
        default=3, description="Evaluations in a row without improvement that end the run."
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Which way is better; null: min, for a loss."
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="A change of this or less is no improvement."
    )
