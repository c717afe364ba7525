"""The layout: one degree per way of spreading a run, parsed from and printed as a short string."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from paceline.deprecation import warn_of_old_name
from paceline.errors import LayoutError
from paceline.formatting import one_of

MOST_RANKS = 1_000_000
"""The largest world that a layout is made for: beyond all machines, and soon counted through."""
_WHOLE = re.compile(r"-?[0-9]{1,20}")


@dataclass(frozen=True)
class Layout:
    """How work and state are spread over ``dp × tp × pp × cp`` ranks.

    ``dp`` is the data-parallel degree, ``zero`` (0..3) what the data-parallel ranks shard,
    ``replicas`` how many full copies they keep, ``tp``/``pp``/``cp``/``ep`` the tensor-,
    pipeline-, context- and expert-parallel degrees. ``str(layout)`` names only what differs from
    the default and parses back to the same layout.
    """

    dp: int = 1
    zero: int = 0
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise LayoutError(f"layout: {name}={value!r} must be a whole number.")
            if name == "zero":
                if not 0 <= value <= 3:
                    raise LayoutError(
                        f"layout: zero={value} must be 0, 1, 2 or 3 (what data-parallel ranks "
                        "shard: nothing, optimizer state, + gradients, + parameters)."
                    )
            elif value < 1:
                raise LayoutError(f"layout: {name}={shown_number(value)} must be 1 or more.")
            elif value > MOST_RANKS:
                raise LayoutError(
                    f"layout: {name}={shown_number(value)} must be {MOST_RANKS} at most."
                )
        if self.world_size > MOST_RANKS:
            raise LayoutError(
                f"layout {str(self)!r} needs {self.world_size} ranks; {MOST_RANKS} are the most."
            )
        if self.dp % self.replicas:
            raise LayoutError(
                f"layout: replicas={self.replicas} must divide dp={self.dp}: each full copy is "
                "kept by dp/replicas ranks."
            )
        if (self.dp * self.cp) % self.ep:
            raise LayoutError(
                f"layout: ep={self.ep} must divide dp × cp = {self.dp * self.cp}: experts are "
                "spread over the data- and context-parallel ranks."
            )

    @classmethod
    def parse(cls, text: str | Layout, *, world_size: int | None = None) -> Layout:
        """Read ``"dp=4,tp=2"``; ``"auto"``, or leaving out ``dp``, lets ``dp`` fill ``world_size``.

        Without a ``world_size``, a ``dp`` that is left out is 1.
        """
        if isinstance(text, Layout):
            return text
        if not isinstance(text, str) or not text.strip():
            raise LayoutError(
                f"layout {text!r} must be text such as 'dp=4,tp=2', or 'auto' for the whole world."
            )
        degrees = read_degrees(text)
        if "dp" not in degrees and world_size is not None:
            rest = 1
            for axis in ("tp", "pp", "cp"):
                rest *= max(degrees.get(axis, 1), 1)
            if world_size % rest:
                raise LayoutError(
                    f"layout {text!r}: tp × pp × cp = {rest} must divide the world size "
                    f"{world_size}, so that dp can fill the rest. Start {rest} ranks, or a "
                    f"multiple of that (--nproc {rest}; in Python fit(nproc={rest}))."
                )
            degrees["dp"] = world_size // rest
        return cls(**degrees)

    @classmethod
    def smallest(cls, text: str | Layout) -> Layout:
        """The layout of the smallest world that ``text`` can be run in.

        Like ``parse(text)``, but a ``dp`` that is left out is the least that ``replicas`` and
        ``ep`` allow. What is wrong with it is wrong in every world.
        """
        if not isinstance(text, str) or not text.strip() or "dp" in (degrees := read_degrees(text)):
            return cls.parse(text)
        replicas, cp, ep = (max(degrees.get(axis, 1), 1) for axis in ("replicas", "cp", "ep"))
        return cls(dp=math.lcm(replicas, ep // math.gcd(ep, cp)), **degrees)

    @property
    def world_size(self) -> int:
        """How many ranks this layout needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def beyond_dp(self) -> dict[str, int]:
        """What this layout uses besides plain data parallelism, by axis."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "dp" and getattr(self, f.name) != f.default
        }

    @property
    def copies(self) -> int:
        """How many data-parallel ranks hold the same piece of the state: all without ``zero``."""
        return self.dp if self.zero == 0 else self.replicas

    @property
    def shards(self) -> int:
        """Over how many data-parallel ranks ``zero`` cuts the state: 1 without it."""
        return self.dp // self.copies

    def coordinate(self, rank: int) -> Coordinate:
        """Where ``rank`` stands on each axis.

        Tensor-parallel ranks are neighbours (they talk most), then context-parallel ones, then
        those that share a sharded copy, then the copies; pipeline stages lie furthest apart.
        """
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinate(pp=pp, dp=dp, cp=cp, tp=tp)

    def place(self, rank: int) -> Coordinate:
        """The old name of ``coordinate``."""
        warn_of_old_name("Layout.place", "coordinate")
        return self.coordinate(rank)

    def check_world(self, world_size: int) -> None:
        """Raise ``LayoutError`` unless this layout needs exactly ``world_size`` ranks."""
        if self.world_size != world_size:
            product = " × ".join(
                f"{axis}={getattr(self, axis)}"
                for axis in ("dp", "tp", "pp", "cp")
                if axis == "dp" or getattr(self, axis) > 1
            )
            raise LayoutError(
                f"layout {str(self)!r} needs {self.world_size} ranks ({product}), but the world "
                f"has {world_size}. Start {self.world_size} ranks, or change the layout."
            )

    def __str__(self) -> str:
        return ",".join(f"{axis}={n}" for axis, n in {"dp": self.dp, **self.beyond_dp}.items())


def shown_number(value: int) -> str:
    """A number that may have more digits than anybody wants to read."""
    return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"


class Coordinate(NamedTuple):
    """Where a rank stands on each axis; ranks that differ in ``pp`` or ``tp`` see the same data."""

    pp: int
    dp: int
    cp: int
    tp: int


def read_degrees(text: str) -> dict[str, int]:
    """The degrees that ``text`` names, by axis; none for ``"auto"``."""
    names = [f.name for f in dataclasses.fields(Layout)]
    degrees: dict[str, int] = {}
    if text.strip() in ("auto", ""):
        return degrees
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise LayoutError(
                f"layout {text!r}: {name!r} must be {one_of(names)}.{hint} "
                'Write it like "dp=4,tp=2".'
            )
        if not equals or not _WHOLE.fullmatch(value):
            raise LayoutError(
                f"layout {text!r}: {part.strip()!r} must be {name}=<whole number>, like {name}=2."
            )
        if name in degrees:
            raise LayoutError(f"layout {text!r}: {name} is given twice.")
        degrees[name] = int(value)
    return degrees
