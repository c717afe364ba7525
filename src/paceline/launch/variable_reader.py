"""Reading the variables of a launcher by its row in the table of ``launchers.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import WorldError
from paceline.launch.launchers import Launcher


class VariableReader:
    """Reads values by the names that launchers have for them, and keeps which were used."""

    def __init__(self, env: Mapping[str, str], sources: Sequence[Launcher]) -> None:
        self.env, self._sources = env, sources
        self.launcher = sources[-1]
        self.task_launcher = None if sources[-1].sets_torchs_variables else sources[-1]
        self.used = [name for source in sources for name in source.marks]

    def names(self, value: str) -> list[str]:
        """The variables that may say it."""
        return [name for source in self._sources for name in getattr(source, value)]

    def name_of(self, value: str) -> str | None:
        """The variable that says it, ``None`` where none does."""
        return next((name for name in self.names(value) if name in self.env), None)

    def number(self, value: str, *, minimum: int = 0, default: int | None = None) -> int:
        """The value, which must be a whole number; ``default`` where nobody says it."""
        name = self.name_of(value)
        if name is None:
            assert default is not None
            return default
        if name not in self.used:
            self.used.append(name)
        return whole_number(self.env, name, self.launcher.fix, minimum=minimum)

    def require(self, *values: str) -> None:
        """Refuse a set of variables that leaves one of these open."""
        missing = [value for value in values if self.name_of(value) is None]
        if not missing:
            return
        known = ("rank", "size", "local_rank")
        found = [name for value in known if (name := self.name_of(value)) is not None]
        said = ", ".join(f"{name}={self.env[name]}" for name in found or self.launcher.marks)
        names = [(self.names(value) or ["WORLD_SIZE"])[0] for value in missing]
        by = "" if self.task_launcher is None else f" by {self.launcher.name}"
        raise WorldError(f"{said} is set{by} but {' and '.join(names)} is not. {self.launcher.fix}")

    def check_below(self, value: str, number: int, limit: str, most: int) -> None:
        """Refuse a number that is not below its limit."""
        if number < most:
            return
        name = self.name_of(value) or value
        limit_name = self.name_of(limit) or limit
        raise WorldError(
            f"{name}={number} with {limit_name}={most}: {name} counts from 0 and must be below "
            f"{limit_name}. {self.launcher.fix}"
        )


def whole_number(env: Mapping[str, str], name: str, fix: str, *, minimum: int = 0) -> int:
    """The variable ``name``, which must be a whole number; ``fix`` is what to do if it is not."""
    text = env[name]
    try:
        value = int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number. {fix}") from None
    if value < minimum:
        raise WorldError(f"{name}={value} must be {minimum} or more. {fix}")
    return value
