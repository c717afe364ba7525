"""One algebra for the sizes of a batch: global = per device × data-parallel ranks × accumulate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import DataError


@dataclass(frozen=True)
class BatchSizes:
    """What the user said of the batch; ``on`` works out the rest for so many ranks.

    ``global_batch`` samples make an optimizer step over all ranks. ``per_device_batch`` of them go
    through the model of one data-parallel rank at once, ``accumulate`` times a step. ``microbatch``
    is the engine's word for the same bound on one pass; alone, it says nothing of the global batch.
    """

    global_batch: int | None = None
    per_device_batch: int | None = None
    accumulate: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        for name, meaning in _MEANINGS.items():
            value: Any = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DataError(
                    f"{name}={value!r} must be a whole number, 1 or more: it is the {meaning}."
                )
        device, micro = self.per_device_batch, self.microbatch
        if None not in (device, micro) and device != micro:
            raise DataError(
                f"per_device_batch={device} and microbatch={micro} both say how many samples go "
                "through the model of one rank at once. Give one of them."
            )

    @property
    def says_global(self) -> bool:
        """Whether the samples of a step follow from what was said."""
        return self.global_batch is not None or self._device is not None

    @property
    def follows_ranks(self) -> bool:
        """Whether the global batch was not stated, and so follows the number of ranks."""
        return self.global_batch is None and self.says_global

    def stated(self) -> dict[str, Any]:
        """What ``paceline.loader`` takes of it, by name."""
        return {
            "global_batch": self.global_batch,
            "per_device_batch": self._device,
            "accumulate": self.accumulate,
        }

    @property
    def _device(self) -> int | None:
        return self.per_device_batch or (None if self.accumulate is None else self.microbatch)

    def on(self, ranks: int, *, exact: bool = True) -> BatchSizes:
        """The sizes on ``ranks`` data-parallel ranks: the global batch, and the bound on a pass.

        Numbers that contradict each other are refused. With ``exact=False`` (a run that goes on
        with other ranks) the global batch stands, and passes follow from it.
        """
        if self.accumulate is not None and not self.says_global:
            raise DataError(
                f"accumulate={self.accumulate} alone does not say how many samples a step takes: "
                "give per_device_batch (samples a rank puts through the model at once) or "
                "global_batch (samples of a step over all ranks) with it."
            )
        total, accumulate = self.global_batch, self.accumulate
        device = self._device
        if device is None:
            if accumulate is None or total is None:
                return self
            if exact and total % (ranks * accumulate):
                raise DataError(
                    f"global_batch={total} is not a multiple of {ranks} data-parallel ranks × "
                    f"accumulate={accumulate} = {ranks * accumulate}. Take a multiple, or state "
                    "per_device_batch instead of accumulate."
                )
            largest_share = -(-total // ranks)
            return BatchSizes(total, microbatch=-(-largest_share // accumulate))
        if total is None:
            total = device * ranks * (accumulate or 1)
        elif exact and accumulate is not None and total != device * ranks * accumulate:
            raise DataError(
                f"global_batch={total} does not agree with per_device_batch={device} × {ranks} "
                f"data-parallel ranks × accumulate={accumulate} = {device * ranks * accumulate}. "
                "Leave one of them out."
            )
        elif exact and total % (device * ranks):
            raise DataError(
                f"global_batch={total} is not a multiple of per_device_batch={device} × {ranks} "
                f"data-parallel ranks = {device * ranks}, so the ranks cannot accumulate whole "
                "passes to it. Leave one of them out, or make them agree."
            )
        return BatchSizes(total, microbatch=device)


_MEANINGS = {
    "global_batch": "number of samples a step takes over all ranks",
    "per_device_batch": "number of samples a rank puts through the model at once",
    "accumulate": "number of passes whose gradients add up to one step",
    "microbatch": "most samples a rank puts through the model at once",
}
