"""Names typed from habit, and what is answered to them."""

from paceline.options.habits.names import (
    HABITS,
    IN_CALL,
    IN_SECTION,
    SECTIONS,
    SENTENCES,
    Habit,
    habit_of,
)
from paceline.options.habits.values import value_meant

__all__ = [
    "HABITS",
    "IN_CALL",
    "IN_SECTION",
    "SECTIONS",
    "SENTENCES",
    "Habit",
    "habit_of",
    "value_meant",
]
