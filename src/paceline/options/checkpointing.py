"""When state is saved, what is kept, and where."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from paceline.credentials import named_key
from paceline.errors import TrainingError
from paceline.options.arguments import documented, renamed
from paceline.options.declare import Option, check

_A_PLACE = "a folder or a URL"


@renamed(at_end="save_at_end")
@documented
@dataclass(frozen=True)
class Checkpointing:
    """When state is saved, what is kept, and where; see docs/guides/checkpoints.md."""

    config_section: ClassVar[str] = "checkpoint"

    every: Annotated[int | None, Option("Save every this many steps.", ge=1)] = None
    keep: Annotated[int, Option("How many of the latest checkpoints to keep.", ge=1)] = 2
    best: Annotated[
        str | None,
        Option(
            "Also keep the best by this validation metric, such as 'loss'.",
            must="the name of a metric",
        ),
    ] = None
    mode: Annotated[
        Literal["min", "max"] | None,
        Option(
            "Whether a smaller (min) or a larger (max) value of best is better; needed for "
            "every metric but a loss.",
            must="'min' (smaller is better) or 'max'",
        ),
    ] = None
    save_at_end: Annotated[
        bool, Option("Save when the run ends. An interrupted run always saves.")
    ] = True
    every_minutes: Annotated[
        float | None,
        Option(
            "Save when this many minutes have passed since the last save.", gt=0, must="above 0"
        ),
    ] = None
    every_epoch: Annotated[bool, Option("Save at the end of each epoch.")] = False
    every_epochs: Annotated[
        int | None, Option("Save at the end of every so many epochs.", ge=1)
    ] = None
    keep_best: Annotated[
        int, Option("How many of the best to keep, where best is given.", ge=1)
    ] = 1
    keep_every: Annotated[
        int | None,
        Option(
            "Keep every checkpoint whose step is a multiple of this, permanently.",
            ge=1,
        ),
    ] = None
    asynchronous: Annotated[
        bool, Option("Write in the background: training only waits for a copy to memory.")
    ] = True
    on_failure: Annotated[
        Literal["warn", "stop"],
        Option(
            "Whether the run goes on (warn) or stops when a save fails. A run whose last save "
            "fails raises either way."
        ),
    ] = "warn"
    retry_seconds: Annotated[
        float,
        Option(
            "Seconds for which the last save of a run is tried again if it fails, so that "
            "there is time to free disk space.",
            ge=0,
            lt=float("inf"),
            must="0 or more",
        ),
    ] = 30.0
    where: Annotated[
        str | None,
        Option(
            "A folder or a URL such as s3://bucket/run. None: checkpoints/ in the run's folder.",
            must=_A_PLACE,
        ),
    ] = None
    storage: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Options for that URL's file system, as fsspec takes them. Credentials are given "
            "by reference: env:NAME or file:/path.",
            must="a dict of fsspec's options",
        ),
    ] = field(default=None, repr=False)  # may hold credentials
    memory_every: Annotated[
        int | None,
        Option(
            "Every this many steps, keep a copy of the state in memory that survives a crash "
            "of the process and, with several nodes, of a node.",
            ge=1,
        ),
    ] = None
    start_from: Annotated[
        str | None,
        Option(
            "Begin a new run with the weights of this checkpoint, run or URL, or of a Hugging Face "
            "folder of safetensors files.",
            must=_A_PLACE,
        ),
    ] = None
    digest: Annotated[
        Literal["xxh3", "blake2b"],
        Option(
            "How bytes are hashed: xxh3 is fast and finds damage, blake2b is a cryptographic hash.",
        ),
    ] = "xxh3"
    digest_key: Annotated[
        str | None,
        Option(
            "With blake2b: the key of the hash, by reference: env:NAME or file:/path. Only "
            "checkpoints written with it are read.",
            must="a reference, env:NAME or file:/path",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in ("where", "start_from"):
            if isinstance(place := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(place))
        check(self, "Checkpointing: ")
        if self.every_epoch and self.every_epochs not in (None, 1):
            raise TrainingError(
                f"Checkpointing: every_epoch=True is every_epochs=1, and every_epochs="
                f"{self.every_epochs} is given. Leave one of them out."
            )
        _ = self.direction  # refuses a metric of which nobody can know it
        for name in ("where", "start_from"):
            if getattr(self, name) is not None and not str(getattr(self, name)):
                raise TrainingError(f"Checkpointing: {name}='' must be {_A_PLACE}.")
        if self.digest_key is not None:
            named_key(self.digest_key)
            if self.digest != "blake2b":
                raise TrainingError(
                    f"Checkpointing: digest={self.digest!r} takes no digest_key; 'blake2b' does."
                )

    @property
    def epochs_between(self) -> int | None:
        """After how many epochs to save; ``None``: epochs do not count."""
        return 1 if self.every_epoch else self.every_epochs

    @property
    def direction(self) -> Literal["min", "max"]:
        """Which way the metric ``best`` is to go: ``mode``, or that of a loss."""
        return direction(self.best, self.mode, "Checkpointing(best=)")


def direction(
    metric: str | None, mode: Literal["min", "max"] | None, who: str
) -> Literal["min", "max"]:
    """``mode``; without one a loss is to be small, and of other metrics nobody can know."""
    if mode is not None:
        return mode
    if metric is None or is_loss(metric):
        return "min"
    raise TrainingError(
        f"{who}: is a larger {metric!r} better, or a smaller one? Pass mode='max' or mode='min'."
    )


_LESS = re.compile(
    "loss|error|err|mae|mse|rmse|mape|perplexity|ppl|nll|wer|cer|fid|bpc|bpb|ece|brier"
)
_MORE = re.compile(
    "accuracy|acc|top1|top5|f1|auc|auroc|auprc|precision|recall|r2|bleu|rouge|meteor|psnr|ssim|map|"
    "iou|miou|dice|mrr|ndcg|mcc|specificity|sensitivity"
)


def known_direction(metric: str) -> Literal["min", "max"] | None:
    """Which way a metric is to go, where a word of its name says it; else ``None``.

    For reading what a run has measured. What is kept or stopped by a metric is not guessed.
    """
    words = re.findall(r"[a-z]+\d*", metric.lower())
    less, more = any(map(_LESS.fullmatch, words)), any(map(_MORE.fullmatch, words))
    if less == more:
        return None
    return "min" if less else "max"


def is_loss(metric: str) -> bool:
    """Whether the name says that less is better; of other metrics nobody can know."""
    return metric.endswith("loss")
