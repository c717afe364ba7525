"""What a user says of how gradients are summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.errors import TrainingError
from paceline.wire.buckets import ONE_BUCKET
from paceline.wire.links import Link, Links

HIERARCHIES = ("auto", "always", "never")
_SIDES = ("within", "across")


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the data-parallel ranks, where ``zero=0``.

    Args:
        hierarchy: within each node, then across nodes: ``always`` where several ranks share a
            node and there are several nodes, ``never``, or ``auto``: where that is faster.
        links: what lies between ranks, for ``auto`` to reckon with instead of measuring:
            ``{"within": "10 Gbit/s 0.05 ms", "across": "100 Mbit/s 5 ms"}``.
        bucket_mib: gradients leave in buckets of this size while the backward goes on; ``None``
            is torch's own 25 MiB, ``tuned`` finds the best size from the first steps.
        overlap: ``False`` lets everything leave together, after the backward.
    """

    hierarchy: Literal["auto", "always", "never"] = "auto"
    links: Mapping[str, str | Link] | None = None
    bucket_mib: float | Literal["tuned"] | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.hierarchy not in HIERARCHIES:
            raise TrainingError(
                f"reduction: hierarchy={self.hierarchy!r} must be {', '.join(HIERARCHIES[:-1])} "
                f"or {HIERARCHIES[-1]}."
            )
        if not isinstance(self.overlap, bool):
            raise TrainingError(f"reduction: overlap={self.overlap!r} must be True or False.")
        self._check_bucket()
        self._check_links()

    def _check_bucket(self) -> None:
        bucket = self.bucket_mib
        if bucket is None:
            return
        is_number = isinstance(bucket, int | float) and not isinstance(bucket, bool)
        if bucket != "tuned" and not (is_number and 0 < float(bucket) < math.inf):
            raise TrainingError(
                f"reduction: bucket_mib={bucket!r} must be a number of MiB above 0, 'tuned', or "
                "None for torch's own 25."
            )
        if not self.overlap:
            raise TrainingError(
                f"reduction: bucket_mib={_shown(bucket)} has no effect without overlap, where "
                "everything leaves in one bucket. Leave one of them out."
            )

    def _check_links(self) -> None:
        if self.links is None:
            return
        if not isinstance(self.links, Mapping) or sorted(self.links) != sorted(_SIDES):
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
