"""What is said of one key of DeepSpeed's config; the keys themselves are in ``table.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["used", "noted", "refused"]

AUTO = "auto"
"""What Hugging Face's configs say for "take it from the program"."""


@dataclass(frozen=True)
class Key:
    """One key: what it takes, and what becomes of it.

    ``nothing`` are the values that ask for nothing, and so are taken without a word.
    """

    name: str
    fate: Fate
    takes: str
    becomes: str
    nothing: tuple[Any, ...] = ()
    auto: str = ""
    """Where the value comes from when it is ``"auto"``; empty: it must be given."""


def used(name: str, takes: str, becomes: str, *, auto: str = "") -> Key:
    """It does here what it does there."""
    return Key(name, "used", takes, becomes, (), auto)


def noted(name: str, takes: str, becomes: str, *nothing: Any, auto: str = "any") -> Key:
    """It is accepted, and a note says what is different."""
    return Key(name, "noted", takes, becomes, (None, *nothing), auto)


def refused(name: str, takes: str, why: str, *nothing: Any) -> Key:
    """It would change what a run computes, and there is nothing here that does the same."""
    return Key(name, "refused", takes, why, (None, *nothing))
