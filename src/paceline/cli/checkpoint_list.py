"""What ``paceline checkpoint ls`` prints: checkpoints, and snapshots in shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.checkpoint_screen import metrics_text, show_json, show_table, when
from paceline.cli.screen import echo
from paceline.formatting import size

if TYPE_CHECKING:
    from paceline.checkpoint.listing import Listed

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Snapshots:
    """What this machine's shared memory holds of a run."""

    run: str
    steps: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        word = "step" if len(self.steps) == 1 else "steps"
        steps = f"{word} {', '.join(map(str, self.steps))}" if self.steps else "no whole snapshot"
        return f"in shared memory: {steps} ({size(self.bytes)})"

    def free(self) -> None:
        """Give the memory back."""
        from paceline.checkpoint.memory.segment_files import free_run

        free_run(self.run, _SHARED_MEMORY)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def snapshots_of(where: str, *, follow: bool = False, key: str | None = None) -> list[Snapshots]:
    """The snapshots in shared memory of the run that ``where`` stands for."""
    from paceline.checkpoint.locate import locate
    from paceline.checkpoint.memory.segment_files import segments

    place = locate(where, follow=follow, key=key)
    folder = place.folder
    known = {where, folder, folder.rpartition("/")[0]}
    known = {name if "://" in name else os.path.abspath(name) for name in known if name}
    held = [one for one in segments(_SHARED_MEMORY, place.digest) if one.run in known]
    return [Snapshots(one.run, one.steps, one.bytes) for one in held]


def show_list(where: str, listed: Sequence[Listed], snapshots: Sequence[Snapshots]) -> None:
    """Print the checkpoints of a run as a table."""
    if listed:
        columns = ("step", "size", "when", "layout", "ranks", "reason", "metrics", "state")
        show_table(columns, [_row(one) for one in listed])
    else:
        echo(f"{where}: no checkpoint yet")
    for one in listed:
        if one.state in ("damaged", "keyed", "old"):
            echo(f"{one.name}: {one.problem}")
    for snapshot in snapshots:
        echo(str(snapshot))


def _row(one: Listed) -> list[str]:
    info = one.info
    ranks = info.get("world_size", one.files if one.state == "whole" else "")
    return [
        str(one.step),
        size(one.bytes) if one.bytes else "",
        when(info),
        str(info.get("layout", "")),
        str(ranks),
        str(info.get("reason", "")),
        metrics_text(info),
        one.state,
    ]


def list_as_json(where: str, listed: Sequence[Listed], snapshots: Sequence[Snapshots]) -> None:
    """Print the same as JSON."""
    show_json(
        {
            "where": where,
            "checkpoints": [asdict(one) for one in listed],
            "memory": [snapshot.to_json() for snapshot in snapshots],
        }
    )
