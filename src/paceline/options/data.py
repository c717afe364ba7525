"""How data is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from paceline.options.arguments import documented
from paceline.options.declare import Option, check


@documented
@dataclass(frozen=True)
class DataOptions:
    """How batches are drawn; ``paceline.loader`` explains each."""

    config_section: ClassVar[str] = "data"

    workers: Annotated[
        int, Option("Loader processes per rank; 0 reads in the rank itself.", ge=0)
    ] = 0
    shuffle: Annotated[
        bool | None,
        Option("Shuffle the training samples. A stream keeps its own order."),
    ] = None
    drop_last: Annotated[bool, Option("Leave out the last, short batch of an epoch.")] = False
    pin_memory: Annotated[
        bool | None, Option("Load into page-locked memory. None: when training on a GPU.")
    ] = None
    collate_fn: Annotated[
        Callable[..., Any] | None,
        Option(
            "Makes a batch of a list of samples. None: as torch does.",
            must="a function that makes a batch of a list of samples",
        ),
    ] = None
    sharded_by_rank: Annotated[
        bool,
        Option("The data is a stream that gives each data-parallel rank samples of its own."),
    ] = False
    compare: Annotated[bool, Option("Ranks compare what they read, and stop where it differs.")] = (
        True
    )

    def __post_init__(self) -> None:
        if self.workers is None:
            object.__setattr__(self, "workers", 0)
        check(self, "DataOptions: ")
