"""How the checkpoint benchmarks tell what they found: a table, and a file beside the others."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results"
console = Console()


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar; the function given moves it on by one. Has no thread, so that forking is safe."""
    with Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(name, total=total)
        shown = 0.0

        def advance() -> None:
            nonlocal shown
            bar.advance(task)
            if time.monotonic() > shown + 0.5 or bar.finished:
                bar.refresh()
                shown = time.monotonic()

        yield advance


def write(name: str, content: dict[str, Any], path: Path | None = None) -> None:
    """Write ``content`` and what machine it is of as JSON."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(), **content}, indent=1), encoding="utf-8")
    console.print(f"written to {path}")


def machine() -> dict[str, Any]:
    """What the figures are of."""
    return {"torch": torch.__version__, "cores": os.cpu_count(), "load_average": load_average()}


def load_average() -> float:
    """How many processes wanted a core during the last minute."""
    return round(os.getloadavg()[0], 2)


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def verdict(met: bool) -> str:
    """For the reader who looks for a single word."""
    return "met" if met else "MISSED"
