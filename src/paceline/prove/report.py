"""What the prover found: a row a layout, printable and as JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.deprecation import warn_of_old_name
from paceline.prove.comparison import ValueKey

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 100


@dataclass(frozen=True)
class Where:
    """A compared value: ``kind`` (loss, gradient, norm, parameter, buffer), ``tensor``, step."""

    kind: str
    tensor: str
    module: str
    step: int
    rank: int

    @classmethod
    def at(cls, place: ValueKey, rank: int) -> Where:
        """From the place in the comparison."""
        return cls(place.kind, place.name, place.name.rpartition(".")[0], place.step, rank)

    def __str__(self) -> str:
        what = f"{self.kind} {self.tensor}".strip()
        return f"{what}, step {self.step}"


@dataclass(frozen=True)
class LayoutResult:
    """One layout: ``outcome`` is ``same``, ``differs``, ``failed`` or ``refused``.

    ``difference`` is the largest relative difference, found at ``where``; ``first`` is the first
    tensor in execution order that differs, and ``cause`` the likely reason, with ``words``. Of a
    layout that is refused, ``words`` is the reason and ``cause`` the rule, if it has a name.
    """

    layout: str
    outcome: str
    difference: float = 0.0
    allowed: float = 0.0
    where: Where | None = None
    first: Where | None = None
    first_difference: float = 0.0
    cause: str | None = None
    words: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the layout computes what one process computes."""
        return self.outcome == "same"

    @property
    def verdict(self) -> str:
        """The old name of ``outcome``."""
        warn_of_old_name("the verdict of a row", "outcome")
        return self.outcome


@dataclass
class VerifyReport:
    """The proof: ``ok`` when every layout computes what one process computes."""

    rows: list[LayoutResult]
    steps: int
    global_batch: int
    precision: str
    noise: float
    device: str = "cpu"
    """Where it was proven: on CPU ranks over Gloo, or on ``cuda`` over NCCL."""
    plant: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every layout is the same as one process."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> str:
        """The whole report as one JSON object."""
        report = {"ok": self.ok, **asdict(self)}
        for row in report["rows"]:
            row["verdict"] = row["outcome"]  # its old name, for one more version
        return json.dumps(_plain(report), indent=2)

    def __str__(self) -> str:
        from paceline.track.console import SafeConsole

        text = io.StringIO()
        self.show(SafeConsole(file=text, width=_WIDTH, color_system=None))
        return text.getvalue().rstrip("\n")

    def show(self, console: Console) -> None:
        """Print the table and, below it, what is wrong and what was done."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("layout", "outcome", "largest difference", "allowed", "where"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            colour = "green" if row.ok else "red"
            failed = row.outcome in ("failed", "refused")
            table.add_row(
                row.layout,
                Text(row.outcome, colour),
                "" if failed else f"{row.difference:.1e}",
                "" if failed else f"{row.allowed:.0e}",
                "" if row.where is None else str(row.where),
            )
        on_gpu = " on GPUs" if self.device == "cuda" else ""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        console.print(
            f"{steps} of {self.global_batch} samples in {self.precision}"
            f"{on_gpu}, against one process:",
            highlight=False,
        )
        console.print(table)
        for row in self.rows:
            if not row.ok:
                console.print(_explanation(row), markup=False, highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _explanation(row: LayoutResult) -> str:
    if row.outcome == "failed":
        return f"{row.layout}: failed: {row.words}"
    if row.outcome == "refused":
        rule = "" if row.cause is None else f" [rule: {row.cause}]"
        return f"{row.layout}: refused: {row.words}{rule}"
    lines = [f"{row.layout}:"]
    if row.first is not None:
        rank = f", rank {row.first.rank}"
        module = f", in module {row.first.module}" if row.first.module else ""
        lines.append(f"  first to differ: {row.first}{rank}{module} ({row.first_difference:.1e})")
    lines.append(f"  likely cause: {row.words} [{row.cause}]")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
