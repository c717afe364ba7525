"""Two hosts and the link between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.testing.hosts import Host, Hosts

_LOOPBACK = "loopback"


@dataclass(frozen=True)
class Link:
    """Mbit/s in each direction, and milliseconds in each: a round trip takes twice as long.

    Without Mbit/s it is the loopback of this machine.
    """

    megabits: float | None
    delay_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read ``"1000"``, ``"100:5"`` or ``"loopback"``."""
        if text == _LOOPBACK:
            return cls(None)
        megabits, _, delay = text.partition(":")
        return cls(float(megabits), float(delay or 0))

    def __str__(self) -> str:
        if self.megabits is None:
            return _LOOPBACK
        delay = f", {self.delay_ms:g} ms each way" if self.delay_ms else ""
        return f"{self.megabits:g} Mbit/s{delay}"


LOOPBACK = Link(None)


@contextlib.contextmanager
def linked(link: Link) -> Iterator[Sequence[Host] | int]:
    """Two hosts joined by a link; for the loopback, the number of ranks to start here."""
    if link.megabits is None:
        yield 2
        return
    with Hosts(2) as hosts:
        hosts[0].rate(link.megabits)
        if link.delay_ms:
            hosts[0].delay(link.delay_ms)
        yield hosts
