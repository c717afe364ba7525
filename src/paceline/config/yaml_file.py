"""YAML in and out: plain data, with the line of every key.

The scalars are those of YAML 1.2, not of PyYAML's 1.1: ``3e-4`` is a number, and ``on``, ``yes``
and ``2024-01-01`` are strings. ``1_000`` is a number too, as in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from paceline.config.bounds import MOST_DIGITS, Budget
from paceline.config.sources import Path
from paceline.errors import ConfigError
from paceline.masking import MASK, says_secret

_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(rf"(?:[-+]?{_DIGITS}|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    rf"(?:[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS}|{_DIGITS}(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_RESOLVERS: list[tuple[str, re.Pattern[str], str]] = [
    (f"{_TAG}null", _NULL, "~nN"),
    (f"{_TAG}bool", _BOOL, "tTfF"),
    (f"{_TAG}int", _INT, "-+0123456789"),
    (f"{_TAG}float", _FLOAT, "-+.0123456789"),
    (f"{_TAG}merge", re.compile(r"<<\Z"), "<"),
]


class _Loader(yaml.SafeLoader):
    """Only its parser and resolver are used: nothing is constructed by tag."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._budget = Budget()
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node; the parser is slow, so what holds too much is not read to its end."""
        self._budget.take(self._depth)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` or a YAML 1.1 reader would take for something else.

    So ``launch.on`` is written ``'on'``: PyYAML itself would read a bare ``on`` as true.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            _tag, _pattern, [*_first, ""] if _pattern is _NULL else list(_first)
        )


def read(text: str, name: str, at: Path = ()) -> tuple[Any, dict[Path, int]]:
    """The data in ``text`` and the line (from 1) of every key; ``name`` is the file in messages.

    ``at`` is the key that all of it stands at.

    Raises ``ConfigError`` for a syntax error, a key given twice or a tag.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        reader = _Reader(name)
        data = reader.value(node, at) if node is not None else None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, name)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{name}:{line}: the character {chr(int(error.character))!r} may not stand in YAML"
        ) from None
    except ConfigError as error:  # more than a config may hold
        raise ConfigError(f"{name}: {error}") from None
    if reader.problems:
        raise ConfigError(reader.problems)
    return data, reader.lines


def read_value(text: str, at: Path = ()) -> Any:
    """The value in an override of key ``at``, like ``[0.9, 0.95]``; raises ``ConfigError``."""
    return read(text, "", at)[0]


def write(data: Any) -> str:
    """``data`` as YAML that ``read`` reads back equal: one key a line, short lists inline."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=99)


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, list | dict) for item in items)
    return dumper.represent_sequence(f"{_TAG}seq", items, flow_style=flat)


def _represent_str(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML reads U+0085 as a line break inside plain and single-quoted text, and folds it away.
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)


class _Reader:
    """Turns nodes into plain data, noting lines and problems on the way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self.problems: list[str] = []
        self._open: list[yaml.Node] = []
        self._budget = Budget()

    def value(self, node: yaml.Node, path: Path) -> Any:
        """The data of ``node``, which stands at ``path``."""
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        self._budget.take(len(self._open), text)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if any(node is outer for outer in self._open):
            self._problem(node, "an alias (*) stands inside what it names")
            return None
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._tag_problem(node)
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self._item(item, (*path, str(i))) for i, item in enumerate(node.value)]
        finally:
            self._open.pop()

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self.lines[path] = _line(node)
        return self.value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                for key, value in self._merge(value_node, path).items():
                    merged.setdefault(key, value)
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
                self._key_problem(key_node)
                continue
            key = key_node.value
            self._budget.take(len(self._open), key)
            if key in own:
                dotted = ".".join((*path, key))
                self._problem(
                    key_node, f"key {dotted!r} is given twice, first on line {first_line[key]}"
                )
                continue
            first_line[key] = self.lines[(*path, key)] = _line(key_node)
            own[key] = self.value(value_node, (*path, key))
        return {**merged, **own}

    def _merge(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """The keys that ``<<: *name`` brings in; the first of several mappings wins."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                result = {**(self.value(part, path) or {}), **result}
            else:
                self._problem(part, "'<<' takes a mapping, like '<<: *name'")
        return result

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        make = _SCALARS.get(node.tag.removeprefix(_TAG))
        if make is None:
            self._tag_problem(node)
            return None
        try:
            return make(node.value)
        except _TooLarge as error:
            self._problem(node, str(error))
            return None
        except ValueError:
            kind = node.tag.removeprefix(_TAG)
            is_secret = any(says_secret(name, bare_key=True) for name in path)
            written = MASK if is_secret else repr(node.value[:60])
            self._problem(node, f"{written} is not a value of type !!{kind}")
            return None

    def _tag_problem(self, node: yaml.Node) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self._problem(node, f"the tag {tag} is not supported; a config holds plain data only")

    def _key_problem(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.ScalarNode):
            self._problem(node, f"key {node.value} is not a string; write it in quotes")
        else:
            self._problem(node, "a key must be a string, not a list or a mapping")

    def _problem(self, node: yaml.Node, text: str) -> None:
        self.problems.append(f"{self.name}:{_line(node)}: {text}")


class _TooLarge(ValueError):
    """A number beyond what is read."""


def _int(text: str) -> int:
    if len(text) > 2 * MOST_DIGITS:  # to read it could take long, to print it would
        raise _TooLarge(f"a number of {len(text)} digits; at most {MOST_DIGITS} are read")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _float(text: str) -> float:
    if text[-3:].lower() in ("inf", "nan"):
        return float(text.replace(".", ""))
    value = float(text)
    if math.isinf(value):
        shown = text if len(text) <= 60 else f"a number of {len(text)} characters"
        raise _TooLarge(f"{shown} is too large for a floating-point number; write .inf if meant")
    return value


def _bool(text: str) -> bool:
    if not _BOOL.match(text):
        raise ValueError(text)
    return text.lower() == "true"


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": str,
}


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax_message(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    text = error.problem or error.context or "cannot be read"
    if isinstance(error, yaml.composer.ComposerError) and "document" in text:
        return f"{place}: a second document starts here; a config is one document"
    if "'\\t'" in text:
        text += "; indent with spaces, not tabs"
    start = error.context_mark
    if start and mark and start.line != mark.line:
        text += f" ({error.context}, line {start.line + 1})"
    return f"{place}: not valid YAML: {text}"
