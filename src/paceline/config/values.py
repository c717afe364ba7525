"""Words for values: what a key takes, and what it was given."""

from __future__ import annotations

import typing
from types import NoneType, UnionType
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config.keys import nearest
from paceline.credentials import Secret
from paceline.formatting import one_of
from paceline.masking import masked
from paceline.options.declare import range_in_words
from paceline.options.habits import value_meant


def expected(info: FieldInfo) -> str:
    """What a key takes, in words: ``"a whole number, 1 or more, or null"``."""
    parts = [
        _kind(kind, [*info.metadata, *extra]) for kind, extra in _alternatives(info.annotation)
    ]
    return ", or ".join(parts) if any("," in part for part in parts) else " or ".join(parts)


def found(value: Any) -> str:
    """What a key was given, in words short enough for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the string {_short(value)}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return _short(value)


def choice_meant(info: FieldInfo, value: Any) -> str | None:
    """The choice of a key with choices that ``value`` probably meant."""
    choices = [
        choice
        for kind, _ in _alternatives(info.annotation)
        if typing.get_origin(kind) is Literal
        for choice in typing.get_args(kind)
    ]
    if value is None:
        return "none" if "none" in choices else None
    if not isinstance(value, str | int) or isinstance(value, bool):
        return None
    word = str(value).lower()
    same = value_meant(word)
    return same if same in choices else nearest(word, choices, cutoff=0.6)


def _alternatives(
    annotation: Any, extra: tuple[Any, ...] = ()
) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kinds a union is made of, each with the limits written beside it."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *limits = typing.get_args(annotation)
        return _alternatives(inner, (*extra, *limits))
    if typing.get_origin(annotation) in (Union, UnionType):
        return [
            found
            for member in typing.get_args(annotation)
            for found in _alternatives(member, extra)
        ]
    return [(annotation, extra)]


def _kind(kind: Any, limits: list[Any]) -> str:
    if kind is NoneType:
        return "null"
    if typing.get_origin(kind) is Literal:
        return one_of(typing.get_args(kind))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(limits)
    if kind is str:
        filled = any(getattr(limit, "min_length", None) for limit in limits)
        return "a non-empty string" if filled else "a string"
    if kind is Secret:
        return "a reference to a credential, env:NAME or file:/path"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a mapping with keys among {', '.join(kind.model_fields)}"
    if typing.get_origin(kind) is list:
        return "a list"
    return "a mapping"


_BOUNDS = ("ge", "gt", "le", "lt")


def _range(limits: list[Any]) -> str:
    bounds: dict[str, Any] = {}
    for limit in limits:
        for part in (limit, *getattr(limit, "metadata", ())):
            bounds |= {name: getattr(part, name) for name in _BOUNDS if hasattr(part, name)}
    return range_in_words(bounds)


def _short(value: Any, limit: int = 60) -> str:
    text = masked(repr(value))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
