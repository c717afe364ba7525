"""A tensor-parallel plan: which module plays which part, and what stays whole. Pure data."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.errors import LayoutError

ROLES = {
    "column": "output features split; a row-parallel layer follows",
    "row": "input features split; outputs summed over the ranks",
    "packed:N": "column, of N layers in one (queries, keys and values: packed:3)",
    "vocabulary": "embedding rows, or output features with the loss, split",
    "gather": "output features split, then put together",
    "replicate": "whole on every rank",
}


@dataclass(frozen=True)
class TensorPlan:
    """What ``apply_plan`` does to a model.

    ``roles`` maps module names to roles (see ``ROLES``), ``reasons`` the names of modules that
    stay whole to why. ``source`` says where the plan comes from.
    """

    tp: int
    roles: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    source: str = "given"
    sequence: bool = False

    def __str__(self) -> str:
        head = f"tensor-parallel plan for tp={self.tp} ({self.source})"
        if self.sequence:
            head += ", activations between split layers cut along the sequence"
        rows = [(name, role, "") for name, role in self.roles.items() if role != "replicate"]
        rows += [(name, "replicate", why) for name, why in self.reasons.items()]
        merged = _merge(rows)
        if not merged:
            return f"{head}\n  nothing is split"
        width = max(len(name) for name, _, _ in merged)
        role_width = max(len(role) for _, role, _ in merged)
        lines = [f"  {n:<{width}}  {r:<{role_width}}  {why}".rstrip() for n, r, why in merged]
        return "\n".join([head, *lines])


def _merge(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Rows that differ only in a number, such as those of a model's blocks, as one row."""
    merged: dict[tuple[str, str, str], list[tuple[int, ...]]] = {}
    for name, role, why in rows:
        numbers = tuple(int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", f".{name}."))
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{}", f".{name}.").strip(".")
        merged.setdefault((pattern, role, _without_numbers(why, name)), []).append(numbers)
    made = []
    for (pattern, role, why), found in merged.items():
        spans = [_span([numbers[i] for numbers in found]) for i in range(len(found[0]))]
        made.append((pattern.format(*spans), role, why))
    return made


def _without_numbers(why: str, name: str) -> str:
    """A reason that names the module's own block reads the same for every block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", why)


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    if low == high:
        return str(low)
    whole = sorted(set(numbers)) == list(range(low, high + 1))
    return f"{low}..{high}" if whole else ",".join(str(n) for n in sorted(set(numbers)))


def check_role(role: str, where: str) -> None:
    """Refuse a role that does not exist."""
    number = re.fullmatch(r"packed:(\d+)", role)
    if number is not None and int(number[1]) >= 2:
        return
    if role not in ROLES or role == "packed:N":
        close = difflib.get_close_matches(role, ROLES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise LayoutError(
            f"{where}: {role!r} is not a role{hint} The roles are "
            + ", ".join(f"{name} ({text})" for name, text in ROLES.items())
            + "."
        )


def roles_from_patterns(patterns: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """``{module name: role}`` for the ``names`` that the patterns match; later patterns win."""
    names = list(names)
    roles: dict[str, str] = {}
    for pattern, role in patterns.items():
        check_role(role, f"tensor-parallel plan: {pattern!r}")
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise LayoutError(
                f"tensor-parallel plan: {pattern!r} matches no module that can be split. "
                + _near(pattern, names)
            )
        for name in matched:
            roles[name] = role
    return {name: roles[name] for name in names if name in roles}


def _near(pattern: str, names: list[str]) -> str:
    shapes = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{name}.").strip(".") for name in names})
    close = difflib.get_close_matches(pattern, shapes, 3, cutoff=0.3)
    if not shapes:
        return "The model has no linear layers or embeddings."
    found = close or shapes[:8]
    return "Near names: " + ", ".join(found) + "."


def chunks_of(role: str) -> int:
    """How many layers a packed one stands for; 1 for every other role."""
    return int(role.removeprefix("packed:")) if role.startswith("packed:") else 1
