"""Where the time of a recovery went, told from the events of a run."""

from __future__ import annotations

from pathlib import Path

from paceline.events import Event, RanksStarted, RestoreTried, RunStarted, read

_MARKS: dict[str, tuple[type[Event], ...]] = {
    "noticed, ranks started": (RanksStarted,),
    "joined": (RestoreTried,),
    "restored": (RunStarted,),
}


def spent(folder: Path, since: float, until: float) -> dict[str, float]:
    """Seconds from one mark to the next; what comes after the last mark is the first step."""
    times = [(event.time, type(event)) for event in read(folder / "run")]
    phases, last = {}, since
    for name, kinds in _MARKS.items():
        found = [time for time, kind in times if kind in kinds and since < time <= until]
        if found:
            phases[name] = max(0.0, found[0] - last)
            last = max(last, found[0])
    phases["first step"] = until - last
    return phases
