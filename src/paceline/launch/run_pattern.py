"""Patterns of run folders: ``runs/{name}-{date}`` is a new folder for every run."""

from __future__ import annotations

import datetime
import os
import re

from paceline.errors import ConfigError

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_FORMS = {"date": "[0-9]{8}", "time": "[0-9]{6}"}
PLACEHOLDERS = ("name", *_FORMS)


def is_pattern(folder: str) -> bool:
    """Whether ``folder`` holds placeholders."""
    return _PLACEHOLDER.search(folder) is not None


def check_pattern(folder: str) -> None:
    """Refuse placeholders that there are not."""
    for word in _PLACEHOLDER.findall(folder):
        if word not in PLACEHOLDERS:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ConfigError(
                f"--run-dir {folder}: there is no {{{word}}}; a pattern may hold {known}."
            )


def expand(folder: str, name: str) -> str:
    """The folder that a pattern stands for now."""
    check_pattern(folder)
    now = datetime.datetime.now()
    values = {"name": name, "date": f"{now:%Y%m%d}", "time": f"{now:%H%M%S}"}
    return _PLACEHOLDER.sub(lambda found: values[found[1]], folder)


def could_be(folder: str, name: str, path: str) -> bool:
    """Whether the absolute ``path`` is one that the pattern ``folder`` stands for at some time."""
    check_pattern(folder)
    parts = _PLACEHOLDER.split(os.path.abspath(folder))
    texts = [
        re.escape(part) if place % 2 == 0 else _FORMS.get(part, re.escape(name))
        for place, part in enumerate(parts)
    ]
    return re.fullmatch("".join(texts) + "(-[0-9]{1,6})?", path) is not None
