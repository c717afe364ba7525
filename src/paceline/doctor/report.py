"""Findings as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.doctor.facts import ClusterFacts
from paceline.doctor.finding import Finding, problems
from paceline.formatting import plural

_ROWS_ALIKE = 3
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def is_sound(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed."""
    return not any(finding.level == "failed" for finding in findings)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the table, and the problems with their fixes after it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in _folded(findings):
        style = _STYLES[finding.level]
        table.add_row(finding.check, Text(finding.level, style), Text(finding.found))
    console.print(table)
    console.print()
    console.print(summary(findings), highlight=False, markup=False)
    for number, finding in enumerate(problems(findings), start=1):
        line = Text(f"{number}. ").append(finding.level, _STYLES[finding.level])
        console.print(line.append(f" {finding.check}: {finding.found}"))
        console.print(Text(f"   {finding.fix}"))


def _folded(findings: Sequence[Finding]) -> list[Finding]:
    """Many machines that are alike well in one row; what is not well has a row of its own."""
    alike = Counter(finding.check for finding in findings if finding.level == "ok")
    rows, told = list[Finding](), set[str]()
    for finding in findings:
        if finding.level != "ok" or alike[finding.check] <= _ROWS_ALIKE:
            rows.append(finding)
        elif finding.check not in told:
            told.add(finding.check)
            others = plural(alike[finding.check] - 1, "other")
            rows.append(replace(finding, found=f"{finding.found} (and {others} well, too)"))
    return rows


def summary(findings: Sequence[Finding]) -> str:
    """``3 problems, 1 warning``, or that there are none."""
    levels = Counter(finding.level for finding in findings)
    parts = []
    if levels["failed"]:
        parts.append(plural(levels["failed"], "problem"))
    if levels["warning"]:
        parts.append(plural(levels["warning"], "warning"))
    return ", ".join(parts) + ":" if parts else "No problems found."


def to_json(findings: Sequence[Finding], facts: ClusterFacts) -> str:
    """Findings, and the facts they were reached from."""
    report = {
        "ok": is_sound(findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }
    return json.dumps(report, indent=2)
