"""Making room: which checkpoints of a folder go, shown before it is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from paceline.checkpoint.best import metrics_in
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.listing import Listed, list_checkpoints
from paceline.checkpoint.retention import Entry, Keep, to_delete
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class PrunePlan:
    """What goes, what stays, and what is left alone: ``unfinished`` goes, ``damaged`` stays."""

    delete: list[Listed]
    stay: list[Listed]
    unfinished: list[Listed]
    damaged: list[Listed]

    @property
    def bytes(self) -> int:
        """How much room it makes, leftovers aside."""
        return sum(one.bytes for one in self.delete)


def plan_prune(
    where: str | os.PathLike[str],
    keep: Keep | None,
    *,
    follow: bool = False,
    key: str | None = None,
) -> PrunePlan:
    """What ``prune`` would delete by the rule ``keep``; without one, leftovers only.

    A damaged checkpoint neither counts as one that is kept nor is deleted: who knows what can
    still be saved from it. For ``follow`` and ``key`` see ``locate``.
    """
    listed = list_checkpoints(where, follow=follow, key=key)
    by_state = {
        state: [one for one in listed if one.state == state]
        for state in ("whole", "unfinished", "damaged", "keyed")
    }
    whole = by_state["whole"]
    gone: set[int] = set()
    if keep is not None:
        _check_metric(whole, keep)
        gone = set(to_delete([Entry(one.step, metrics_in(one.info)) for one in whole], keep))
    return PrunePlan(
        [one for one in whole if one.step in gone],
        [one for one in whole if one.step not in gone],
        by_state["unfinished"],
        by_state["damaged"] + by_state["keyed"],
    )


def prune(
    folder: Folder, plan: PrunePlan, progress: Callable[[int], None] | None = None
) -> list[str]:
    """Delete what ``plan`` says; the names of all that went. Only for the holder of the lock.

    The newest one that stays is verified first, every byte of it: where it is damaged, nothing is
    deleted. ``progress`` is called with the bytes verified since the last call.
    """
    if plan.delete:
        newest = folder.get(plan.stay[-1].step)
        if damages := newest.damages(progress):
            raise CheckpointError(
                f"{newest.path}, the newest that would stay, is damaged. {damages[0]} Nothing was "
                "deleted. Move it away, then prune again."
            )
    for one in plan.delete:
        folder.remove(folder.get(one.step))
    return [*(one.name for one in plan.delete), *folder.clean()]


def _check_metric(whole: list[Listed], keep: Keep) -> None:
    """A metric that no checkpoint knows would keep nothing by it: no doubt a slip."""
    if not keep.best or not whole or any(keep.metric in metrics_in(one.info) for one in whole):
        return
    known = sorted({name for one in whole for name in metrics_in(one.info)})
    raise CheckpointError(
        f"no checkpoint was saved with the metric {keep.metric!r}; they have "
        f"{', '.join(known) or 'none'}. Nothing was deleted."
    )
