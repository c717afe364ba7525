"""Which layout a run goes on with when there are more or fewer ranks than before; no torch."""

from __future__ import annotations

import dataclasses

from paceline.layout.layout import Layout, read_degrees


def fit(layout: Layout | str, ranks: int) -> Layout | None:
    """The largest layout like ``layout`` that ``ranks`` ranks can run; ``None`` where none can.

    ``tp``, ``pp``, ``cp``, ``ep`` and ``zero`` stay as they are, since they decide whether the
    model fits at all. ``dp`` is as asked where there are ranks for it, else as many as there are
    ranks for; of a text that leaves it out (``"auto"``, ``"tp=2"``) always the latter. It is
    lowered further until ``ep`` divides ``dp × cp``. ``replicas`` is lowered to what divides the
    new ``dp`` without spreading a copy over fewer ranks than asked, where that can be.

    The layout may need fewer than ``ranks``: the others have no part in it.
    """
    degrees = read_degrees(layout) if isinstance(layout, str) else dataclasses.asdict(layout)
    rest = max(degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1), 1)
    most = ranks // rest
    asked = degrees.get("dp", most)
    if "dp" in degrees:
        Layout(**degrees)  # a layout that was never sound is no matter of the number of ranks
    for dp in range(min(asked, most), 0, -1):
        if (dp * degrees.get("cp", 1)) % degrees.get("ep", 1) == 0:
            replicas = _replicas(dp, asked, degrees.get("replicas", 1))
            return Layout(**{**degrees, "dp": dp, "replicas": replicas})
    return None


def _replicas(dp: int, asked_dp: int, asked: int) -> int:
    """How many full copies ``dp`` ranks keep, where ``asked`` were to be kept by ``asked_dp``."""
    ranks_of_a_copy = max(asked_dp // asked, 1)
    return next(
        (n for n in range(min(asked, dp), 1, -1) if dp % n == 0 and dp // n >= ranks_of_a_copy), 1
    )
