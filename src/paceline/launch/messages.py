"""Messages that came through a store: JSON alone, and taken only in the form that is expected.

Anyone who reaches a store can write into it, so a message is untrusted until it has been
checked: ``decode`` checks the type of every field, and raises nothing but ``BadMessage``.
Nothing that came through a store is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

MOST_BYTES = 4 << 20
"""More than any message of ours has; a longer one is not even parsed."""


class BadMessage(ValueError):
    """What stands in the store is not a message of ours."""


def encode(message: Any) -> str:
    """A dataclass, or what JSON knows, as one line of text."""
    is_record = dataclasses.is_dataclass(message) and not isinstance(message, type)
    return json.dumps(dataclasses.asdict(message) if is_record else message)


def decode(kind: type[T], text: str | bytes) -> T:
    """The message of that kind in ``text``; raises ``BadMessage`` where it holds none.

    ``kind`` is a dataclass, or any other type that pydantic knows. Numbers are not made of text,
    nor text of numbers; fields that ``kind`` does not have are left out.
    """
    if len(text) > MOST_BYTES:
        raise BadMessage(f"a message of {len(text)} bytes, more than any of ours has")
    known: Any = kind
    try:
        found: T = _adapter(known).validate_json(text, strict=True)
        return found
    except ValidationError as error:
        raise _bad(kind, error) from None


def check(message: T) -> T:
    """A dataclass whose fields have the types that they should have."""
    decode(type(message), encode(message))
    return message


def decode_number(text: str | bytes) -> int:
    """The whole number in ``text``."""
    try:
        digits = text.decode("ascii") if isinstance(text, bytes) else text
        if len(digits) > 20:
            raise ValueError
        return int(digits)
    except ValueError:  # that of decoding is one, too
        raise BadMessage(f"not a number: {text[:40]!r}") from None


def decode_text(text: bytes) -> str:
    """The UTF-8 text in ``text``."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise BadMessage(f"not text: {text[:40]!r}") from None


def _bad(kind: Any, error: ValidationError) -> BadMessage:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "it"
    return BadMessage(f"not a {getattr(kind, '__name__', kind)}: {where}: {first['msg']}")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
