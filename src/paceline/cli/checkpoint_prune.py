"""``paceline checkpoint prune``: plan, ask, delete, say."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.checkpoint_list import Snapshots, snapshots_of
from paceline.cli.checkpoint_screen import bar, show_json, shown
from paceline.cli.screen import echo

if TYPE_CHECKING:
    from paceline.checkpoint.pruning import PrunePlan
    from paceline.checkpoint.retention import Keep


def run_prune(
    where: str,
    keep: Keep | None,
    looking: dict[str, Any],
    *,
    memory: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Do it, or with ``dry_run`` say what would be done; ``looking`` is what ``locate`` takes."""
    from paceline.checkpoint.locate import find_folder, locate
    from paceline.checkpoint.pruning import plan_prune, prune
    from paceline.errors import CheckpointError

    if (name := locate(where, **looking).name) is not None:
        raise CheckpointError(f"{where} is one checkpoint: name the folder {name} is in.")
    folder = find_folder(where, **looking)

    def planned() -> tuple[PrunePlan, list[Snapshots]]:
        snapshots = snapshots_of(where, **looking) if memory else []
        return plan_prune(where, keep, **looking), snapshots

    if dry_run:
        plan, snapshots = planned()
        _report(plan, [one.name for one in _going(plan)], snapshots, as_json, done=False)
        return
    with folder.lock("paceline checkpoint prune"):
        plan, snapshots = planned()
        if not _confirmed(plan, snapshots, yes or as_json):
            echo("nothing was deleted", err=True)
            raise SystemExit(1)
        checked = plan.stay[-1].bytes if plan.delete else 0
        with bar("verifying the newest", checked) as move:
            removed = prune(folder, plan, move)
        for snapshot in snapshots:
            snapshot.free()
    _report(plan, removed, snapshots, as_json, done=True)


def _going(plan: PrunePlan) -> list[Any]:
    return [*plan.delete, *plan.unfinished]


def _confirmed(plan: PrunePlan, snapshots: list[Snapshots], yes: bool) -> bool:
    going = _going(plan)
    if yes or not (going or snapshots) or not sys.stdin.isatty():
        return True
    for one in going:
        echo(f"{shown(one.path)}{' (unfinished)' if one.state == 'unfinished' else ''}")
    for snapshot in snapshots:
        echo(str(snapshot))
    return typer.confirm(f"Delete {'these' if len(going) + len(snapshots) > 1 else 'this'}?")


def _report(
    plan: PrunePlan, removed: list[str], snapshots: list[Snapshots], as_json: bool, *, done: bool
) -> None:
    from paceline.formatting import plural, size

    if as_json:
        show_json(
            {
                "dry_run": not done,
                "deleted" if done else "would_delete": removed,
                "bytes": plan.bytes,
                "kept": [one.step for one in plan.stay],
                "damaged": [{"step": one.step, "problem": one.problem} for one in plan.damaged],
                "memory": [snapshot.to_json() for snapshot in snapshots],
            }
        )
        return
    verb = "deleted" if done else "would delete"
    for name in removed:
        echo(f"{verb} {name}")
    for snapshot in snapshots:
        echo(f"{'freed' if done else 'would free'} {snapshot}")
    for one in plan.damaged:
        why = "it is damaged" if one.state == "damaged" else "it has a key"
        echo(f"left alone, since {why}: {shown(one.path)}: {one.problem}", err=True)
    stay = plural(len(plan.stay), "checkpoint")
    gone = f"{plural(len(plan.delete), 'checkpoint')} ({size(plan.bytes)})"
    echo(f"{verb} {gone}, {stay} {'stay' if len(plan.stay) != 1 else 'stays'}")
