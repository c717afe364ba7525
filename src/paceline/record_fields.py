"""The fields of a dataclass read from JSON: each of the type that the class says, or refused.

>>> read_fields(StepDone, {"step": 1, "loss": "nan", ...})    # a dict to make one of
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Union

_MOST = 2**63 - 1
_NOT_FINITE = ("nan", "inf", "-inf")

Read = Callable[[Any], Any]
"""Takes a value from JSON, returns what the field gets; raises ``ValueError``."""


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """What a field asks for besides its type: ``Annotated[float, FieldRule("…", check)]``."""

    words: str
    holds: Callable[[Any], bool]


def read_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``cls`` in ``data``; others are left out.

    Raises ``ValueError`` that names the field where one is missing or not of its type. JSON has no
    NaN and no infinity: a number may be one of the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    found = {}
    for name, (read, required) in _fields_of(cls).items():
        if name not in data:
            if required:
                raise ValueError(f"{name} is missing")
            continue
        try:
            found[name] = read(data[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


@functools.cache
def _fields_of(cls: type) -> dict[str, tuple[Read, bool]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: (
            _reader(hints[field.name]),
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(cls)
    }


def _reader(hint: Any) -> Read:
    """What reads a value of this type."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _ruled(_reader(arguments[0]), arguments[1])
    if origin is list:
        return _list_of(_reader(arguments[0]))
    if origin is dict:
        assert arguments[0] is str, hint
        return _dict_of(_reader(arguments[1]))
    if origin in (Union, types.UnionType):
        return _either([_reader(argument) for argument in arguments])
    raise TypeError(f"no field of type {hint} can be read")


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -_MOST <= value <= _MOST:
        raise ValueError("is no whole number of 64 bits")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    return value if isinstance(value, float) else _whole(value)


def _of_type(kind: type) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"is no {kind.__name__}")
        return value

    return read


_PLAIN: dict[Any, Read] = {
    int: _whole,
    float: _number,
    str: _of_type(str),
    bool: _of_type(bool),
    types.NoneType: _of_type(types.NoneType),
}


def _ruled(read: Read, rule: FieldRule) -> Read:
    def check(value: Any) -> Any:
        found = read(value)
        if not rule.holds(found):
            raise ValueError(f"must be {rule.words}")
        return found

    return check


def _list_of(read: Read) -> Read:
    def all_of(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError("is no list")
        return [read(one) for one in value]

    return all_of


def _dict_of(read: Read) -> Read:
    def all_of(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("is no object")
        return {key: read(one) for key, one in value.items()}

    return all_of


def _either(reads: list[Read]) -> Read:
    def first(value: Any) -> Any:
        for read in reads:
            try:
                return read(value)
            except ValueError as error:
                refused = error
        raise refused

    return first


FINITE = FieldRule("a finite number of a clock's size", lambda value: abs(value) <= 1e12)
MOMENT = FieldRule("a time between 1970 and 9999", lambda value: 0 <= value < 2.5e11)
POSITIVE = FieldRule("1 or more", lambda value: value >= 1)
NOT_EMPTY = FieldRule("given for one rank at least", bool)
