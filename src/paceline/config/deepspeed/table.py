"""Every key of DeepSpeed's config, and what becomes of it here: the one table.

``read.py`` reads configs by it, and the table in docs/guides/deepspeed.md is written from it.
"""

from __future__ import annotations

from paceline.config.deepspeed.general_keys import (
    BATCH,
    COMMUNICATION,
    MODEL,
    OPTIMIZER,
    PRECISION,
    REPORTING,
)
from paceline.config.deepspeed.keys import Key
from paceline.config.deepspeed.switched_keys import SWITCHED, SwitchedSection
from paceline.config.deepspeed.zero_keys import ZERO

_GROUPS = (
    ("Batch sizes", BATCH),
    ("Optimizer, schedule and clipping", OPTIMIZER),
    ("Number formats", PRECISION),
    ("ZeRO", ZERO),
    ("Communication", COMMUNICATION),
    ("Model, data and checkpoints", MODEL),
    ("Reporting", REPORTING),
)

KEYS: dict[str, Key] = {key.name: key for _, keys in _GROUPS for key in keys}
"""By its dotted name; those of sections that are refused as a whole are in ``SECTIONS``."""

SECTIONS: dict[str, SwitchedSection] = {section.key.name: section for section in SWITCHED}
"""The sections that are refused as a whole, by name."""


def markdown() -> str:
    """The table of the docs: every key, what becomes of it, and what that means."""
    lines: list[str] = []
    for title, keys in _GROUPS:
        lines += [
            f"### {title}",
            "",
            "| key | | what it becomes, or what to know |",
            "|---|---|---|",
        ]
        lines += [f"| `{key.name}` | {key.fate} | {key.becomes}{_silent(key)} |" for key in keys]
        lines.append("")
    lines += ["### Sections that are refused unless they are switched off", ""]
    lines += ["| section | its keys | why, and what to do |", "|---|---|---|"]
    for section in SWITCHED:
        names = ", ".join(f"`{name}`" for name in section.keys)
        lines.append(f"| `{section.key.name}` | {names} | {section.key.becomes} |")
    return "\n".join(lines) + "\n"


def _silent(key: Key) -> str:
    """The values that a refused key may have."""
    plain = [value for value in key.nothing if value not in (None, "")]
    if key.fate != "refused" or not plain:
        return ""
    return f" Fine: {', '.join(f'`{_json(value)}`' for value in plain)}."


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
