"""How the checkpoint commands look: tables, sizes and times, a bar where it takes long."""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.cli.screen import echo, echo_json
from paceline.untrusted import printable

_RIGHT = {
    "step",
    "size",
    "tensors",
    "elements",
    "ranks",
    "files",
    "absolute",
    "relative",
    "loss",
    "age",
}


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: fitted to a terminal; elsewhere plain, one line a row, nothing cut."""
    rows = [[printable(cell, one_line=True) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _plain_table(columns, rows)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from paceline.track.console import SafeConsole

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in _RIGHT else "left")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    SafeConsole().print(table)


_STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "whole": "green",
    "damaged": "red",
    "unfinished": "yellow",
    "old": "yellow",
    "keyed": "yellow",
}


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        echo("  ".join(cells).rstrip())


def show_json(value: Any) -> None:
    """Print a value as JSON; infinity and NaN, which JSON lacks, become strings."""
    echo_json(json.dumps(_without_nonfinite(value), indent=2))


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over ``total`` bytes on a terminal, moved on by calling what this yields."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda count: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from paceline.track.console import SafeConsole

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def shown(path: str) -> str:
    """A path as a person would type it: from the current folder on, where it lies below that."""
    here = os.getcwd().rstrip("/") + "/"
    return path.removeprefix(here)


def when(info: Mapping[str, Any]) -> str:
    """When a checkpoint was saved, in this machine's time."""
    text = str(info.get("time") or "")
    try:
        saved = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    return saved.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def metrics_text(info: Mapping[str, Any]) -> str:
    """The metrics that a checkpoint was saved with, in one line."""
    from paceline.formatting import number

    metrics = info.get("metrics")
    if not isinstance(metrics, Mapping):
        return ""
    return ", ".join(
        f"{name} {number(value) if isinstance(value, float) else value}"
        for name, value in metrics.items()
    )


def parse_size(text: str) -> int:
    """``5GB``, ``500 MB`` or a number of bytes."""
    units = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
    number = text.strip().upper().rstrip("BKMGT ")
    unit = text.strip().upper()[len(number) :].strip()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 1 <= size < math.inf:
        from paceline.errors import ConfigError

        raise ConfigError(f"{text!r} is no size in bytes; give one like 5GB or 500MB.")
    return int(size)
