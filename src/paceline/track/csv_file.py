"""Events as a CSV file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from paceline.track.run_recorder import Ending, RunRecorder

FILE_NAME = "metrics.csv"


class CSV(RunRecorder):
    """Writes every number to the CSV file ``path``: a column for each name, a row for each report.

    The first columns are ``step`` and ``time``. A step and the evaluation after it are two rows;
    ``pandas.read_csv(path).groupby("step").first()`` makes one of them. A new name adds a column. A
    resumed run goes on in the same file: rows of steps that it repeats are taken out first.
    """

    name: ClassVar[str] = "CSV"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = []
        self._file: io.TextIOWrapper | None = None

    def begin(self, facts: Mapping[str, Any], first_step: int) -> None:
        """Open the file at its end, without the rows of steps to come."""
        self._close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = ["step", "time"]
        if self.path.exists():
            self._rewrite(upto=first_step)
        self._open()

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add a row."""
        new = [name for name in values if name not in self._columns]
        if new:
            self._close()
            self._rewrite(more=new)
            self._open()
        row = {"step": step, "time": f"{time:.3f}", **values}
        assert self._file is not None
        csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def end(self, how: Ending) -> None:
        """Close the file."""
        self._close()

    def _rewrite(self, more: list[str] | None = None, upto: int | None = None) -> None:
        """The file anew, with further columns, or without rows after the step ``upto``."""
        part = self.path.with_name(f".{self.path.name}.part")
        with part.open("w", newline="", encoding="utf-8") as target:
            writer = csv.writer(target)
            rows = self._rows()
            found = next(rows, None)
            self._columns = [*(found or self._columns), *(more or ())]
            writer.writerow(self._columns)
            for row in rows:
                if upto is None or _step(row) <= upto:
                    writer.writerow([*row, *[""] * (len(self._columns) - len(row))])
        part.replace(self.path)

    def _rows(self) -> Any:
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as source:
                yield from csv.reader(source)

    def _open(self) -> None:
        empty = not self.path.exists() or self.path.stat().st_size == 0
        self._file = self.path.open("a", newline="", encoding="utf-8")
        if empty:
            csv.writer(self._file).writerow(self._columns)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step(row: list[str]) -> float:
    """The step of a row; a row that was cut off, by a crash or a full disk, belongs to no step."""
    try:
        return int(row[0])
    except (IndexError, ValueError):
        return float("inf")
