"""Writes coming-from/names.md from the table of names typed from habit; a test holds it equal."""

from __future__ import annotations

from pathlib import Path

from paceline.options.habits.names import HABITS

_HEAD = """# Names you know

What other libraries call something, and how it is written here. You need not look it up: pass one
of these names to `Trainer`, `fit`, `Engine`, `prepare` or `loader`, write it as a key of a config,
or type it as an option of `paceline train`, and the answer is what stands here. A name that is not
here is answered with the closest one, or with all that there are.

See [coming from another library](index.md) for whole scripts.
"""


def page() -> str:
    """The text of the page."""
    lines = [_HEAD, "| name | known from | in Python | in a config |", "|---|---|---|---|"]
    for name in sorted(HABITS):
        habit = HABITS[name]
        example = f": `{habit.meaning.python}`" if habit.meaning.python else ""
        config = f"`{habit.meaning.in_config}`" if habit.meaning.in_config else ""
        known = ", ".join(habit.known_from)
        lines.append(f"| `{name}` | {known} | {habit.meaning.says}{example} | {config} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("coming-from").joinpath("names.md").write_text(page())
