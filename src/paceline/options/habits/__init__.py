"""Names typed from habit, and what is answered to them."""

from paceline.options.habits.names import HABITS, IN_SECTION, SECTIONS, Habit, habit_of

__all__ = ["HABITS", "IN_SECTION", "SECTIONS", "Habit", "habit_of"]
