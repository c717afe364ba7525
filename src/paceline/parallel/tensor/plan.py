"""A tensor-parallel plan: which module plays which part, and what stays whole. Pure data."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import LayoutError

ROLES = {
    "column": "output features split; a row-parallel layer follows",
    "row": "input features split; outputs summed over the ranks",
    "packed:N": "column, of N layers in one (queries, keys and values: packed:3)",
    "heads:N": "column, of N heads of keys or values, fewer than ranks: several hold each",
    "attention": "an nn.MultiheadAttention with its heads split",
    "experts": "stacked experts, the hidden features of each split",
    "vocabulary": "embedding rows, or output features with the loss, split",
    "gather": "output features split, then put together",
    "replicate": "whole on every rank",
}


@dataclass(frozen=True)
class TensorPlan:
    """What ``apply_plan`` does to a model.

    ``roles`` maps module names to roles (see ``ROLES``), ``reasons`` the names of modules that
    stay whole to why. ``source`` says where the plan comes from. ``ties`` maps parameters that are
    split because a module with a role shares them to the dimension and the number of chunks: a
    pipeline stage may hold one without the other. Of the model's parameters, ``split_share`` are
    split, and each rank holds ``held_share`` (the part of one rank, and all that is whole).
    """

    tp: int
    roles: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    source: str = "given"
    sequence: bool = False
    ties: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    split_share: float = 0.0
    held_share: float = 1.0

    def __str__(self) -> str:
        head = f"tensor-parallel plan for tp={self.tp} ({self.source})"
        if self.sequence:
            head += ", activations between split layers cut along the sequence"
        rows = [(name, role, "") for name, role in self.roles.items() if role != "replicate"]
        rows += [(name, "replicate", why) for name, why in self.reasons.items()]
        merged = _merge(rows)
        if not merged:
            return f"{head}\n  nothing is split"
        head += f"\n{self.shares}"
        width = max(len(name) for name, _, _ in merged)
        role_width = max(len(role) for _, role, _ in merged)
        lines = [f"  {n:<{width}}  {r:<{role_width}}  {why}".rstrip() for n, r, why in merged]
        return "\n".join([head, *lines])

    @property
    def shares(self) -> str:
        """What each rank holds, in words."""
        return (
            f"each of {self.tp} ranks holds {self.held_share:.0%} of the parameters: "
            f"{self.split_share:.0%} are split, the rest is whole on every rank"
        )

    def summary(self, most: int = 6) -> str:
        """``shares``, and which layers stay whole, and why."""
        rows = _merge([(name, "", why) for name, why in self.reasons.items()])
        told = [f"{name} ({why})" for name, _, why in rows[:most]]
        more = f", and {len(rows) - most} more" if len(rows) > most else ""
        return f"tensor parallel: {self.shares}" + (
            f". Whole: {', '.join(told)}{more}" if told else ""
        )


def common_plan(plans: Sequence[TensorPlan]) -> TensorPlan:
    """What all of ``plans``, one of each rank, say; a layer on which they differ stays whole."""
    first = plans[0]
    differ = sorted(
        name
        for name in {name for plan in plans for name in plan.roles}
        if len({plan.roles.get(name, "replicate") for plan in plans}) > 1
    )
    if not differ:
        return first
    roles = {name: "replicate" if name in differ else role for name, role in first.roles.items()}
    why = dict.fromkeys(differ, "the ranks found different plans for it")
    return replace(first, roles=roles, reasons={**first.reasons, **why}, ties={})


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
    number = re.fullmatch(r"(?:packed|heads):(\d+)", role)
    if number is not None and int(number[1]) >= 2:
        return
    if role not in ROLES or role.endswith(":N"):
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


def heads_of(role: str) -> int | None:
    """How many heads a layer makes whose heads several ranks share; ``None`` for other roles."""
    return int(role.removeprefix("heads:")) if role.startswith("heads:") else None
