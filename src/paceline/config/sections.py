"""What all sections of a config have in common, and how a key follows from an option's declaration.

    _key = keys_of(Evaluation)

    class Train(Section):
        eval_every: int | None = _key("every")

The key has the option's default, bounds and sentence; only its type, which a config may narrow, is
written again. A test holds the types together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import TrainingError
from paceline.options.declare import Declared, declared, members

_IN_YAML = {"None": "null", "True": "true", "False": "false"}
_DECLARED: Any = object()


class Section(BaseModel):
    """A part of the config: unknown keys refused, nothing coerced, nothing changed once built."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may hold credentials
    )


def keys_of(owner: type) -> Callable[..., Any]:
    """Makes keys of the options that ``owner`` declares: ``key(name)``.

    ``default`` stands in for the declared one where a config's differs, and ``note`` says more.
    """

    def key(name: str, *, default: Any = _DECLARED, note: str = "", **more: Any) -> Any:
        found = declared(owner)[name]
        text = in_yaml(f"{found.option.text} {note}".strip())
        return Field(
            default=found.default if default is _DECLARED else default,
            description=text,
            **{**(_bounds(found) if _is_plain(found) else {}), **more},
        )

    return key


def switch(value: Any) -> Any:
    """``true`` is a section with its defaults, ``false`` is none."""
    return ({} if value else None) if isinstance(value, bool) else value


def limits(owner: type, name: str) -> Any:
    """The bounds of an option, for the number among the several kinds of value it may have."""
    return Field(**_bounds(declared(owner)[name]))


def in_yaml(text: str) -> str:
    """The sentence of an option with ``None``, ``True`` and ``False`` as a config writes them."""
    return re.sub(r"\b(None|True|False)\b", lambda word: _IN_YAML[word[0]], text)


def check_as_options(make: Callable[[], object]) -> None:
    """Have options check themselves; the section's name comes with every error of a config."""
    try:
        make()
    except (TrainingError, ValueError) as error:
        raise ValueError(str(error).partition(": ")[2] or str(error)) from None


def _is_plain(found: Declared) -> bool:
    """Whether pydantic can take the bounds with the key: a number, or nothing at all."""
    return len([kind for kind in members(found.type) if kind is not type(None)]) == 1


def _bounds(found: Declared) -> dict[str, Any]:
    return {name: bound for name, bound in found.option.bounds.items() if math.isfinite(bound)}
