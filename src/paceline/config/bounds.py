"""How much a config may hold, so that any file somebody sends is read or refused in a moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.untrusted import MOST_CONFIG_BYTES

MOST_BYTES = MOST_CONFIG_BYTES
MOST_VALUES = 5_000
"""Keys, items and single values, with what aliases repeat counted each time."""
MOST_LEVELS = 50
MOST_CHARACTERS = 4 * MOST_BYTES
"""Of all text together, with what aliases repeat counted each time."""
MOST_DIGITS = 100


class Budget:
    """Counts what was read; raises ``ConfigError`` with the bound that was passed."""

    def __init__(self) -> None:
        self._values = self._characters = 0

    def take(self, depth: int, text: str = "") -> None:
        """One more value, ``depth`` levels below the top, and the text it consists of."""
        self._values += 1
        self._characters += len(text)
        if self._values > MOST_VALUES:
            raise ConfigError(
                f"holds more than {MOST_VALUES:,} values (an alias counts as all that it repeats); "
                "keep large lists and tables in a file that the code reads"
            )
        if self._characters > MOST_CHARACTERS:
            raise ConfigError(
                f"holds more than {MOST_CHARACTERS:,} characters (an alias counts as all that it "
                "repeats); keep long texts in a file that the code reads"
            )
        if depth > MOST_LEVELS:
            raise ConfigError(f"is nested more than {MOST_LEVELS} levels deep")


def check_bounds(data: Any) -> None:
    """Raise ``ConfigError`` where ``data`` from any source holds more than a config may."""
    budget = Budget()
    waiting: list[tuple[Any, int]] = [(data, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Mapping):
            for key, item in value.items():
                budget.take(depth, key if isinstance(key, str) else "")
                waiting.append((item, depth + 1))
        elif isinstance(value, list | tuple):
            waiting += [(item, depth + 1) for item in value[: MOST_VALUES + 1]]
        elif isinstance(value, int) and not isinstance(value, bool):
            check_digits(value)
        budget.take(depth, value if isinstance(value, str) else "")


def check_digits(value: int) -> None:
    """Refuse whole numbers that no setting can mean; Python does not even print some of them."""
    digits = math.ceil(value.bit_length() * math.log10(2))
    if digits > MOST_DIGITS:
        raise ConfigError(
            f"holds a whole number of about {digits:,} digits; at most {MOST_DIGITS} are read"
        )
