"""How an option is declared: its type, default, bounds and sentence stand once, in a dataclass.

    @documented
    @dataclass(frozen=True)
    class Evaluation:
        every: Annotated[int | None, Option("Evaluate every this many steps.", ge=1)] = None

        def __post_init__(self) -> None:
            check(self, "Evaluation: ")

The config's schema, ``help()``, the checks of a value and the tables of the documentation are made
from that. The signatures of ``Engine`` and ``Trainer`` repeat name, type and default, for editors;
a test holds them equal.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from paceline.errors import TrainingError
from paceline.formatting import one_of
from paceline.options.habits import value_meant

T = TypeVar("T")
_SHOWN = 60
_BOUNDS = ("ge", "gt", "le", "lt")


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its type and its default.

    Args:
        text: what it does, in a sentence or two. A config shows ``None`` in it as ``null``.
        key: its config key, where that is not ``section.name``; ``""``: a config has none.
        ge: the least value of a number.
        gt: what a number must be above.
        le: the largest value of a number.
        lt: what a number must be below.
        must: what a value must be, in words, where type and bounds do not say it well.
    """

    text: str
    key: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    must: str = ""

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that there are, by name."""
        named = {name: getattr(self, name) for name in _BOUNDS}
        return {name: bound for name, bound in named.items() if bound is not None}


@dataclass(frozen=True)
class Declared:
    """An option as its class declares it."""

    owner: type
    name: str
    type: Any
    default: Any
    option: Option

    @property
    def key(self) -> str | None:
        """Its key in a config, such as ``checkpoint.every``; ``None`` where a config has none."""
        if self.option.key is not None:
            return self.option.key or None
        section: str | None = getattr(self.owner, "config_section", None)
        if section is None:
            return None
        return f"{section}.{self.name}" if section else self.name

    @property
    def must_be(self) -> str:
        """What a value must be, in words."""
        if self.option.must:
            return self.option.must
        kinds = [kind for kind in members(self.type) if kind is not types.NoneType]
        return " or ".join(_in_words(kind, self.option) for kind in kinds)

    @property
    def type_in_words(self) -> str:
        """Its type as a person writes it: ``int | None``."""
        return " | ".join(_type_name(kind) for kind in members(self.type))


def declared(owner: type) -> Mapping[str, Declared]:
    """The options that the dataclass ``owner`` declares, by name."""
    if owner not in _CACHE:
        _CACHE[owner] = _declared(owner)
    return _CACHE[owner]


_CACHE: dict[type, Mapping[str, Declared]] = {}


def _declared(owner: Any) -> Mapping[str, Declared]:
    hints = typing.get_type_hints(owner, include_extras=True)
    found = {}
    for field in dataclasses.fields(owner):
        kind, *notes = typing.get_args(hints[field.name])
        option = next(note for note in notes if isinstance(note, Option))
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        found[field.name] = Declared(owner, field.name, kind, default, option)
    return types.MappingProxyType(found)


def check(options: Any, whose: str = "") -> None:
    """Raise ``TrainingError`` for the first value that its declaration does not allow."""
    for name, found in declared(type(options)).items():
        value = getattr(options, name)
        if not is_allowed(found, value):
            meant = value_meant(value)
            hint = f" Did you mean {meant!r}?" if meant and is_allowed(found, meant) else ""
            raise TrainingError(f"{whose}{name}={shown(value)} must be {found.must_be}.{hint}")


def is_allowed(found: Declared, value: Any) -> bool:
    """Whether an option may have ``value``."""
    return any(_fits(value, kind, found.option.bounds) for kind in members(found.type))


def shown(value: Any) -> str:
    """``value`` as a user would write it, cut short."""
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def members(kind: Any) -> tuple[Any, ...]:
    """The types that a union is made of; else the one."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _fits(value: Any, kind: Any, bounds: Mapping[str, float]) -> bool:
    origin = typing.get_origin(kind) or kind
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if origin in (int, float):
        number = isinstance(value, int if origin is int else int | float)
        return number and not isinstance(value, bool) and _is_within(value, bounds)
    if origin is Callable:
        return callable(value)
    if origin is Sequence:
        items = isinstance(value, Sequence) and not isinstance(value, str)
        return items and all(_fits(item, typing.get_args(kind)[0], {}) for item in value)
    return isinstance(value, origin)


def _is_within(value: float, bounds: Mapping[str, float]) -> bool:
    return (
        not math.isnan(value)
        and value >= bounds.get("ge", -math.inf)
        and value <= bounds.get("le", math.inf)
        and ("gt" not in bounds or value > bounds["gt"])
        and ("lt" not in bounds or value < bounds["lt"])
    )


def _in_words(kind: Any, option: Option) -> str:
    if typing.get_origin(kind) is Literal:
        return one_of(typing.get_args(kind))
    if kind is bool:
        return "True or False"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + range_in_words(option.bounds)
    if kind is str:
        return "text"
    if dataclasses.is_dataclass(kind):
        return f"made with paceline.{_type_name(kind)}(…)"
    return f"a {_type_name(kind)}"


def range_in_words(bounds: Mapping[str, Any]) -> str:
    """``", 1 or more"``, ``" from 0 to below 1"``: what follows the name of a number's kind."""
    told = {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    if "ge" in told and "le" in told:
        return f" from {told['ge']} to {told['le']}"
    if "ge" in told and "lt" in told:
        return f" from {told['ge']} to below {told['lt']}"
    if "gt" in told:
        return f" above {told['gt']}"
    return f", {told['ge']} or more" if "ge" in told else ""


def _type_name(kind: Any) -> str:
    if kind is types.NoneType:
        return "None"
    if typing.get_origin(kind) is Literal:
        return " | ".join(map(repr, typing.get_args(kind)))
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        return kind.__name__
    return str(kind).replace("typing.", "").replace("collections.abc.", "")
