"""How a global batch is cut into the shares of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import DataError


class Share(NamedTuple):
    """What one rank got of one global batch.

    ``samples`` of the batch's ``global_samples`` are this rank's; ``epoch`` is the batch's.
    """

    samples: int
    global_samples: int
    epoch: int = 0


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """The half-open slice of ``total`` samples that falls to ``rank`` of ``size``.

    Slices are near equal and the first ranks take the remainder: 7 over 3 is 3, 2, 2.
    """
    check_rank(rank, size)
    if not isinstance(total, int) or isinstance(total, bool) or total < 0:
        raise DataError(f"share: total={total!r} must be a whole number of samples, 0 or more.")
    each, rest = divmod(total, size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)


def check_rank(rank: object, size: object) -> None:
    """Raise :class:`DataError` unless ``0 <= rank < size``."""
    for name, value in (("rank", rank), ("size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{name}={value!r} must be a whole number.")
    assert isinstance(rank, int)
    assert isinstance(size, int)
    if size < 1:
        raise DataError(f"size={size} must be 1 or more: it is the number of ranks.")
    if not 0 <= rank < size:
        raise DataError(f"rank={rank} must be from 0 to size-1={size - 1}: ranks count from 0.")


@dataclass(frozen=True)
class Cut:
    """How the data is cut: into global batches, and each of those into one share a rank."""

    global_batch: int
    drop_last: bool
    rank: int
    size: int

    def share(self, total: int) -> tuple[int, int]:
        """This rank's slice of a batch of ``total`` samples."""
        return share(total, self.rank, self.size)
