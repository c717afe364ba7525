"""What the checkpoint commands print."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.checkpoint_screen import bar, metrics_text, show_json, show_table, shown, when
from paceline.cli.screen import echo
from paceline.formatting import count, duration, plural, size
from paceline.untrusted import printable

if TYPE_CHECKING:
    from paceline.checkpoint.block_reader import Damage
    from paceline.checkpoint.checkpoint import Checkpoint
    from paceline.checkpoint.diff import Difference
    from paceline.checkpoint.manifest import Manifest, TensorEntry
    from paceline.checkpoint.weights.export_files import Weight

_LARGEST = 10


def show_checkpoint(checkpoint: Checkpoint, every_tensor: bool) -> None:
    """Print what a checkpoint holds."""
    manifest = checkpoint.manifest
    echo(shown(checkpoint.path))
    facts = {"step": manifest.step, "size": size(manifest.size), "files": len(manifest.files)}
    facts |= {"saved": when(manifest.info), "metrics": metrics_text(manifest.info)}
    facts |= {"digest": manifest.digest}
    others = {k: v for k, v in manifest.info.items() if k not in ("time", "metrics")}
    for name, value in {**facts, **others}.items():
        if value not in ("", None):
            echo(f"  {name:<12} {_shortened(value)}")
    if manifest.objects:
        echo(f"  {'objects':<12} {_shortened(', '.join(manifest.objects))}")
    echo()
    show_table(("group", "tensors", "elements", "size"), _groups(manifest))
    chosen = list(manifest.tensors.items())
    if not every_tensor and len(chosen) > _LARGEST:
        chosen = sorted(chosen, key=lambda item: -_bytes(item[1]))[:_LARGEST]
    echo()
    rows = [
        (name, str(list(one.shape)), one.dtype, size(_bytes(one)), str(_files(one)))
        for name, one in chosen
    ]
    show_table(("tensor", "shape", "dtype", "size", "files"), rows)
    if left := len(manifest.tensors) - len(chosen):
        echo(f"the {_LARGEST} largest; {left} more with --tensors")


def _groups(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Totals by the first part of the names: model, optimizer, …"""
    totals: dict[str, list[int]] = {}
    for name, entry in manifest.tensors.items():
        total = totals.setdefault(name.partition("/")[0], [0, 0, 0])
        for index, amount in enumerate((1, _elements(entry), _bytes(entry))):
            total[index] += amount
    if manifest.objects:
        used = sum(entry.length for entry in manifest.objects.values())
        totals["objects"] = [0, 0, used]
    return [
        (group, str(tensors or ""), count(elements) if tensors else "", size(used))
        for group, (tensors, elements, used) in totals.items()
    ]


def show_checkpoint_as_json(checkpoint: Checkpoint) -> None:
    """Print the same as JSON, every tensor with it."""
    manifest = checkpoint.manifest
    show_json(
        {
            "path": checkpoint.path,
            "step": manifest.step,
            "bytes": manifest.size,
            "info": manifest.info,
            "digest": manifest.digest,
            "files": {name: entry.size for name, entry in manifest.files.items()},
            "tensors": {
                name: {
                    "shape": entry.shape,
                    "dtype": entry.dtype,
                    "bytes": _bytes(entry),
                    "files": _files(entry),
                }
                for name, entry in manifest.tensors.items()
            },
            "objects": {name: entry.length for name, entry in manifest.objects.items()},
        }
    )


def _bytes(entry: TensorEntry) -> int:
    return sum(stored.length for stored in entry.stored)


def _elements(entry: TensorEntry) -> int:
    return sum(stored.box.size for stored in entry.stored)


def _files(entry: TensorEntry) -> int:
    return len({stored.file for stored in entry.stored})


def _shortened(value: Any) -> str:
    text = printable(value, one_line=True)
    return text if len(text) <= 200 else f"{text[:199]}…"


@dataclass(frozen=True)
class CheckedCheckpoint:
    """What reading every byte of a checkpoint found."""

    path: str
    step: int
    bytes: int
    seconds: float
    damages: list[Damage]


def verified(checkpoint: Checkpoint) -> CheckedCheckpoint | None:
    """Read every byte of a checkpoint, with a bar; ``None`` if it was deleted meanwhile."""
    from paceline.checkpoint.manifest import MANIFEST
    from paceline.errors import CheckpointError

    started = time.perf_counter()
    was_there = True
    try:
        total = checkpoint.manifest.size
    except CheckpointError:
        total, was_there = 0, False  # reported as damage
    with bar(f"step {checkpoint.step}", total) as move:
        damages = checkpoint.damages(move)
    manifest = f"{checkpoint.name}/{MANIFEST}"
    if damages and was_there and checkpoint.storage.size(manifest) is None:
        echo(f"{shown(checkpoint.path)} was deleted meanwhile", err=True)
        return None
    return CheckedCheckpoint(
        checkpoint.path, checkpoint.step, total, time.perf_counter() - started, damages
    )


def show_checked(results: Sequence[CheckedCheckpoint], as_json: bool) -> None:
    """Print what is whole and what is damaged."""
    if as_json:
        show_json(
            {"ok": not any(v.damages for v in results), "checkpoints": list(map(asdict, results))}
        )
        return
    for result in results:
        if not result.damages:
            speed = f"{size(result.bytes)} in {duration(result.seconds)}"
            echo(f"whole: {shown(result.path)} ({speed})")
            continue
        echo(f"damaged: {shown(result.path)}")
        for damage in result.damages:
            echo(f"  {damage}")


def show_difference(
    a: Checkpoint, b: Checkpoint, found: Difference, limit: int, as_json: bool
) -> None:
    """Print how two checkpoints differ."""
    if as_json:
        show_json({"a": a.path, "b": b.path, "equal": found.equal, **asdict(found)})
        return
    echo(f"A: {_headline(a)}")
    echo(f"B: {_headline(b)}")
    most = limit if limit > 0 else len(found.tensors) + len(found.objects)
    if found.tensors:
        rows = [
            (t.name, t.kind, t.a if t.a == t.b else f"{t.a or '-'} → {t.b or '-'}",
             str(t.elements or ""), _amount(t.absolute), _amount(t.relative))
            for t in found.tensors[:most]
        ]  # fmt: skip
        show_table(
            ("tensor", "differs in", "dtype and shape", "elements", "absolute", "relative"), rows
        )
    if found.objects:
        values = [(o.name, o.a or "-", o.b or "-") for o in found.objects[:most]]
        show_table(("object", "in A", "in B"), values)
    left = max(len(found.tensors) - most, 0) + max(len(found.objects) - most, 0)
    if left:
        echo(f"… and {left} more; --limit 0 lists all")
    equal = f"{plural(found.equal_tensors, 'tensor')} and {plural(found.equal_objects, 'object')}"
    if found.equal:
        echo(f"bitwise-identical: {equal}")
    else:
        differ = f"{plural(len(found.tensors), 'tensor')} and {plural(len(found.objects), 'value')}"
        echo(f"{differ} differ; {equal} are bitwise-identical")
    for clock in found.clocks:
        echo(f"not counted, being seconds: {clock.name}, {clock.a} in A, {clock.b} in B")


def _headline(checkpoint: Checkpoint) -> str:
    layout = checkpoint.manifest.info.get("layout")
    return f"{shown(checkpoint.path)} (step {checkpoint.step}{f', {layout}' if layout else ''})"


def _amount(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def show_export(
    checkpoint: Checkpoint, weights: Sequence[Weight], written: Path, format: str, as_json: bool
) -> None:
    """Say what was written."""
    files = sorted(written.iterdir()) if written.is_dir() else [written]
    used = sum(file.stat().st_size for file in files)
    if as_json:
        show_json(
            {
                "checkpoint": checkpoint.path,
                "step": checkpoint.step,
                "target": str(written),
                "format": format,
                "tensors": len(weights),
                "bytes": used,
                "files": [str(file) for file in files],
            }
        )
        return
    where = str(written) if len(files) == 1 else f"{written} ({plural(len(files), 'file')})"
    echo(f"wrote {where}: {plural(len(weights), 'tensor')} of step {checkpoint.step}, {size(used)}")


def show_import(checkpoint: Checkpoint, as_json: bool) -> None:
    """Say what became of it."""
    manifest = checkpoint.manifest
    if as_json:
        show_json(
            {"path": checkpoint.path, "tensors": len(manifest.tensors), "bytes": manifest.size}
        )
        return
    tensors = plural(len(manifest.tensors), "tensor")
    echo(f"wrote {shown(checkpoint.path)}: {tensors}, {size(manifest.size)}")
