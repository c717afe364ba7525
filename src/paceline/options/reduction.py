"""How gradients are summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.errors import TrainingError
from paceline.network.buckets import ONE_BUCKET
from paceline.network.links import Link, Links
from paceline.options.arguments import documented
from paceline.options.declare import Option, check

_SIDES = ("within", "across")


@documented
@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the data-parallel ranks, where ``zero=0``.

    See docs/guides/reduction.md.
    """

    config_section: ClassVar[str] = "reduction"

    hierarchy: Annotated[
        Literal["auto", "always", "never"],
        Option(
            "Sum within each node first, then across nodes, where several ranks share a node and "
            "there are several nodes; auto: where that is faster.",
        ),
    ] = "auto"
    links: Annotated[
        Mapping[str, str | Link] | None,
        Option(
            "The links between ranks, for auto to calculate with: {within: 10 Gbit/s 0.05 ms, "
            "across: 100 Mbit/s 5 ms}. None: measured when needed.",
            must="a dict such as {'within': '10 Gbit/s 0.05 ms', 'across': '100 Mbit/s 5 ms'}",
        ),
    ] = None
    bucket_mib: Annotated[
        float | Literal["tuned"] | None,
        Option(
            "MiB of gradients in one message (bucket), sent while the backward goes on; "
            "tuned: the best size, found in the first steps. None: torch's 25.",
            gt=0,
            lt=math.inf,
            must="a number of MiB above 0, 'tuned', or None for torch's own 25",
        ),
    ] = None
    overlap: Annotated[
        bool,
        Option("Send gradients while the backward goes on. False: all at once, after it."),
    ] = True

    def __post_init__(self) -> None:
        check(self, "reduction: ")
        self._check_bucket()
        self._check_links()

    def _check_bucket(self) -> None:
        bucket = self.bucket_mib
        if bucket is None:
            return
        if not self.overlap:
            raise TrainingError(
                f"reduction: bucket_mib={_shown(bucket)} has no effect without overlap, where "
                "everything leaves in one bucket. Leave one of them out."
            )

    def _check_links(self) -> None:
        if self.links is None:
            return
        if sorted(self.links) != sorted(_SIDES):
            raise TrainingError(
                f"reduction: links={self.links!r} must tell of both kinds, as in "
                "{'within': '10 Gbit/s 0.05 ms', 'across': '100 Mbit/s 5 ms'}."
            )
        assert self.described is not None

    @property
    def described(self) -> Links | None:
        """The links as numbers, if the user told of them."""
        if self.links is None:
            return None
        return Links(**{side: _link(self.links[side]) for side in _SIDES})

    @property
    def asked(self) -> tuple[str, ...]:
        """What was asked for that not every layout can do, as it was written."""
        told = {
            "hierarchy": self.hierarchy == "always",
            "bucket_mib": self.bucket_mib is not None,
            "overlap": not self.overlap,
        }
        return tuple(f"{name}={_shown(getattr(self, name))}" for name, said in told.items() if said)

    @property
    def tuned(self) -> bool:
        """Whether the size of buckets is to be found."""
        return self.bucket_mib == "tuned"

    @property
    def static_mib(self) -> float | None:
        """The size of buckets from the first step on; ``None``: torch's own."""
        if not self.overlap:
            return ONE_BUCKET
        return float(self.bucket_mib) if isinstance(self.bucket_mib, int | float) else None

    @classmethod
    def of(cls, value: Reduction | None) -> Reduction:
        """``None`` stands for everything as it is by default."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        raise TrainingError(f"reduction={value!r} must be a paceline.Reduction(…).")


def _shown(value: object) -> str:
    """A number as it was written: 5, where a config has made 5.0 of it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _link(value: str | Link) -> Link:
    return value if isinstance(value, Link) else Link.parse(value)
