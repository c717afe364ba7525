"""The one console that rich draws on: it shows what is printable, and says when it is gone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from paceline.untrusted import printable


class SafeConsole(Console):
    """A console for text from files and from other machines.

    Control characters in a text are shown as escapes, and brackets are no markup. When
    the reader of the output goes away, that is a ``BrokenPipeError``, as for any other stream.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Everything that is drawn passes here; what rich adds to steer the terminal stays."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Rich would exit with status 1, which is an answer of some commands."""
        raise BrokenPipeError
