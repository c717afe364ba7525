"""Credentials: named by where they are kept, shown masked, read only by the process that needs one.

A config is copied, printed, compared between machines and sent to trackers. So it never holds a
credential, but a reference to it: ``env:NAME``, a variable of the environment, or ``file:/path``, a
file that its owner alone can read.

    key: Secret | None = None            # a key of the schema
    config.some_section.key.reveal()     # where it is needed, and no sooner
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import CoreSchema, core_schema

from paceline.errors import ConfigError
from paceline.masking import MASK, is_reference, literals, masked, says_secret
from paceline.untrusted import NotReadable, open_file

HOW_TO = (
    "write env:NAME for a variable of the environment, or file:/path for a file that you alone "
    "can read (chmod 600)"
)
_MOST_BYTES = 64 * 1024


class Secret:
    """A credential by its reference, ``env:NAME`` or ``file:/path``; ``reveal()`` reads it.

    Shown anywhere, it is its reference; one made by ``of`` is ``***``. As a key of the schema
    it takes a reference and is written out as one. Raises ``ValueError`` for anything else.
    """

    __slots__ = ("_value", "reference")

    def __init__(self, reference: str) -> None:
        self.reference = _checked(reference)
        self._value: str | None = None

    @classmethod
    def of(cls, value: str) -> Secret:
        """A secret that this process made or was given; it cannot be written to a config."""
        made = cls.__new__(cls)
        made.reference, made._value = "", value
        return made

    def reveal(self) -> str:
        """The credential, read now; ``ConfigError`` says why it cannot be had."""
        if self._value is not None:
            return self._value
        kind, _, name = self.reference.partition(":")
        return _from_variable(name) if kind == "env" else _from_file(os.path.expanduser(name))

    def __repr__(self) -> str:
        return f"Secret({self.reference!r})" if self.reference else f"Secret({MASK})"

    def __str__(self) -> str:
        return self.reference or MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return (self.reference, self._value) == (other.reference, other._value)

    def __hash__(self) -> int:
        return hash((self.reference, self._value))

    @classmethod
    def _validated(cls, value: Any) -> Secret:
        if isinstance(value, Secret):
            if not value.reference:
                raise ValueError(f"a config cannot keep a credential itself; {HOW_TO}")
            return value
        if not isinstance(value, str):
            raise ValueError(f"is not a reference to a credential; {HOW_TO}")
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": "^(env:[A-Za-z_]|file:[/~])"}


def named_key(reference: Any) -> Secret:
    """The key of checkpoints that ``env:NAME`` or ``file:/path`` refers to; it is not read yet."""
    if not isinstance(reference, str):
        raise ConfigError(f"the key of checkpoints is named by where it is kept: {HOW_TO}.")
    try:
        return Secret(reference)
    except ValueError as error:
        raise ConfigError(f"the key of checkpoints: {error}.") from None


def check_no_literals(value: Any, path: tuple[str, ...] = (), *, bare_key: bool = False) -> None:
    """Raise ``ValueError`` where a credential itself stands in ``value``, without repeating it."""
    for place, found in literals(value, path, bare_key=bare_key):
        where = f"{'.'.join(place)} " if place else ""
        if isinstance(found, str) and masked(found) != found and "://" in found:
            raise ValueError(
                f"{where}holds a credential, {masked(found)!r}; a config is kept and shown, so take"
                f" it out of the URL and give it by itself: {HOW_TO}"
            )
        if isinstance(found, str) and found.startswith(("env:", "file:")):
            try:
                Secret(found)
            except ValueError as error:
                raise ValueError(f"{where.strip()}: {error}") from None
        raise ValueError(
            f"{where}is a credential itself; a config is kept and shown, so instead {HOW_TO}"
        )


def references(value: Any, *, everywhere: bool = True, name: str = "") -> list[str]:
    """The references in ``value`` and whatever it holds; see ``revealed``."""
    found: list[str] = []
    _replaced(value, name, everywhere, False, lambda reference: found.append(str(reference)))
    return found


def revealed(value: Any, *, everywhere: bool = True, name: str = "") -> Any:
    """``value`` with the credentials in place of the references in it, at any depth.

    Not ``everywhere``: only under names that say they are credentials, where other text may look
    like a reference by chance.
    """
    return _replaced(value, name, everywhere, False, Secret.reveal)


def secret_values(options: Any, name: str = "", *, inside: bool = False) -> set[str]:
    """The credentials in options that were revealed, or that a user's own code gave in clear."""
    inside = inside or says_secret(name, bare_key=True)
    if isinstance(options, Mapping):
        inner: Iterable[tuple[str, Any]] = ((str(k), v) for k, v in options.items())
    elif isinstance(options, list | tuple):
        inner = ((name, item) for item in options)
    else:
        return {options} if inside and isinstance(options, str) and len(options) > 2 else set()
    return {text for key, item in inner for text in secret_values(item, key, inside=inside)}


def without(text: str, values: Iterable[str]) -> str:
    """``text`` with ``values``, and whatever looks like a credential by itself, masked."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK).replace(repr(value)[1:-1], MASK)
    return masked(text)


def _replaced(value: Any, name: str, everywhere: bool, inside: bool, read: Any) -> Any:
    if isinstance(value, Secret):
        return read(value)
    inside = inside or says_secret(name, bare_key=everywhere)
    if isinstance(value, Mapping):
        return {
            key: _replaced(item, str(key), everywhere, inside, read) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(item, name, everywhere, inside, read) for item in value]
    if (everywhere or inside) and is_reference(value):
        return read(Secret(value))
    return value


def _checked(reference: str) -> str:
    if is_reference(reference):
        return reference
    if reference.startswith("env:"):
        raise ValueError("env: must be followed by the name of a variable, like env:MY_SECRET")
    if reference.startswith("file:"):
        raise ValueError(
            "file: must be followed by an absolute path, like file:/home/me/secret or "
            "file:~/secret: ranks, and a resume, may start in another folder"
        )
    # What was written may be the credential itself: it is not repeated.
    raise ValueError(f"a credential itself must not stand here; {HOW_TO}")


def _from_variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise ConfigError(f"env:{name}: the variable {name} is {state}; export it and start again")
    return value


def _from_file(path: str) -> str:
    try:
        with open_file(path, _MOST_BYTES) as file:
            state, data = os.fstat(file.fileno()), file.read()
    except NotReadable as error:
        raise ConfigError(f"file:{path}: {error}; name a file with the credential alone") from None
    except OSError as error:
        raise ConfigError(f"file:{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name with a NUL in it
        raise ConfigError(f"file:{path}: {error}") from None
    if state.st_mode & 0o077:
        raise ConfigError(
            f"file:{path}: others than its owner may read or write it "
            f"(mode {stat.S_IMODE(state.st_mode):04o}); run: chmod 600 {path}"
        )
    try:
        text = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"file:{path}: is not UTF-8 text") from None
    if not text:
        raise ConfigError(f"file:{path}: is empty")
    return text
