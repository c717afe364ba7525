"""How a global batch is cut into the shares of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.data.arguments import check_rank, whole_number


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
    whole_number("total", total, 0, "number of samples to share")
    each, rest = divmod(total, size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)


def steps_per_epoch(samples: int, global_batch: int, drop_last: bool) -> int:
    """How many global batches ``samples`` make; the last may be short, or dropped if it is."""
    whole, rest = divmod(samples, global_batch)
    return whole + (rest > 0 and not drop_last)


@dataclass(frozen=True)
class BatchCut:
    """How the data is cut: into global batches, and each of those into one share a rank."""

    global_batch: int
    drop_last: bool
    rank: int = 0
    size: int = 1

    def share(self, total: int) -> tuple[int, int]:
        """This rank's slice of a batch of ``total`` samples."""
        return share(total, self.rank, self.size)
