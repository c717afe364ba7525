"""Judging the folders of a run: shared, writable, fast, with room for checkpoints."""

from __future__ import annotations

from paceline.doctor.facts import SYNC_BYTES, ClusterFacts, FolderFacts, Machine
from paceline.doctor.finding import Finding, failed, ok, warning
from paceline.formatting import binary_size, byte_rate

SLOW_SYNC = 5e6
"""Bytes a second to the disk below which saving checkpoints will hold a run up."""


def folders(facts: ClusterFacts) -> list[Finding]:
    """Whether every machine can write where the run writes, and how fast."""
    findings = []
    for machine in facts.machines:
        for folder in machine.folders:
            findings += _folder(machine, folder)
    return findings


def _folder(machine: Machine, folder: FolderFacts) -> list[Finding]:
    title = f"{machine.name}: {folder.key} {folder.where}"
    if folder.error:
        return [
            failed(
                "folders",
                f"{title} cannot be written: {folder.error}",
                f"Make it writable on {machine.name}, or choose another with --set {folder.key}=….",
            )
        ]
    if folder.sync_seconds is None:
        return [ok("folders", f"{title} is writable")]
    speed = SYNC_BYTES / max(folder.sync_seconds, 1e-9)
    if speed < SLOW_SYNC:
        return [
            warning(
                "folders",
                f"{title} takes {byte_rate(speed)} to the disk",
                f"Choose a faster disk with --set {folder.key}=…, or save more rarely "
                "(checkpoint.every).",
            )
        ]
    return [ok("folders", f"{title} is writable, {byte_rate(speed)} to the disk")]


def shared(facts: ClusterFacts) -> list[Finding]:
    """Whether all machines see the same folder: what one wrote, the others must find."""
    findings = []
    for key in dict.fromkeys(seen.key for seen in facts.seen):
        tried = [seen for seen in facts.seen if seen.key == key]
        where = _where(facts, key)
        unseen = [seen for seen in tried if not seen.ok]
        if not unseen:
            findings.append(ok("shared", f"{key} {where}: one folder, seen by all machines"))
            continue
        pairs = "; ".join(f"{s.reader} does not see what {s.writer} wrote" for s in unseen[:4])
        if len(unseen) > 4:
            pairs += f"; and {len(unseen) - 4} more"
        errors = sorted({seen.error for seen in unseen if seen.error})
        found = f"{key} {where}: {pairs}" + (f" ({'; '.join(errors)})" if errors else "")
        if _holds_checkpoints(facts, key):
            findings.append(
                failed(
                    "shared",
                    found,
                    f"Mount the same folder at {where} on every machine, or set "
                    "checkpoint.where to a folder or URL that all of them reach.",
                )
            )
        else:
            findings.append(
                warning(
                    "shared",
                    found,
                    f"Mount the same folder at {where} on every machine; else logs stay on the "
                    "machine that wrote them.",
                )
            )
    return findings


def disk(facts: ClusterFacts) -> list[Finding]:
    """Whether the next checkpoint fits, and as many as are kept."""
    return [
        _room(machine, folder)
        for machine in facts.machines
        for folder in machine.folders
        if folder.holds_checkpoints and not folder.error
    ]


def _room(machine: Machine, folder: FolderFacts) -> Finding:
    title = f"{machine.name}: {folder.where}"
    model = machine.model
    free = "as much as the store has" if folder.free is None else f"{binary_size(folder.free)} free"
    if model.error:
        return warning(
            "disk",
            f"{title}: {free}; the size of a checkpoint cannot be told: {model.error}",
            "Compare the first checkpoint (paceline checkpoint ls RUN) with what is free.",
        )
    one = model.model_bytes + model.optimizer_bytes
    at_once = machine.plan.checkpoints_at_once
    needs = f"a checkpoint of {model.parameters:,} parameters is about {binary_size(one)}"
    found = f"{title}: {free}; {needs}, {at_once} at once"
    if folder.free is None or folder.free >= at_once * one:
        return ok("disk", found)
    fix = (
        f"Free {binary_size(at_once * one - folder.free)} on {machine.name}, set checkpoint.where "
        "to a larger disk, or lower checkpoint.keep."
    )
    if folder.free < one:
        return failed("disk", f"{found}: not even one fits", fix)
    return warning("disk", f"{found}: they will not all fit", fix)


def _where(facts: ClusterFacts, key: str) -> str:
    found = [f.where for machine in facts.machines for f in machine.folders if f.key == key]
    return found[0] if found else ""


def _holds_checkpoints(facts: ClusterFacts, key: str) -> bool:
    return any(
        folder.holds_checkpoints
        for machine in facts.machines
        for folder in machine.folders
        if folder.key == key
    )
