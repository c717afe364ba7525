"""Attributes that people look for from habit: ``trainer.train()``, ``world.world_size``."""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Collection
from functools import cache
from typing import Any


@cache
def attributes() -> dict[str, dict[str, str]]:
    """By the kind of object and the name that is looked for, what to use instead."""
    found: dict[str, dict[str, str]] = {}
    table = importlib.resources.files(__package__).joinpath("attributes.txt")
    for line in table.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, names, instead = (part.strip() for part in line.split(" | "))
            found.setdefault(kind, {}).update(dict.fromkeys(names.split(), instead))
    return found


def missing_attribute(owner: Any, kind: str, name: str) -> Any:
    """For ``__getattr__``: raise an ``AttributeError`` that says what to use instead of ``name``.

    An attribute that is there, and whose own code has raised an ``AttributeError``, raises it.
    """
    if name.startswith("_") or hasattr(type(owner), name):
        return object.__getattribute__(owner, name)
    public = {known for known in (*dir(type(owner)), *vars(owner)) if not known.startswith("_")}
    raise AttributeError(answer(kind, name, public), name=name, obj=owner)


def answer(kind: str, name: str, public: Collection[str]) -> str:
    """What to say to whoever looks for ``name`` in a ``kind``, which has the ``public`` names."""
    has_none = f"{kind} has no attribute {name!r}"
    known = attributes()[kind]
    if name in known:
        return f"{has_none}: use {known[name]}."
    if near := difflib.get_close_matches(name, public, n=1, cutoff=0.7):
        return f"{has_none}: did you mean {near[0]!r}?"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"{has_none}, nor {near[0]!r}: use {known[near[0]]}."
    return f"{has_none}: there are {', '.join(sorted(public))}."
