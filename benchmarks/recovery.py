"""From SIGKILL of a rank to the next step: Paceline beside other ways to train and resume.

Two ranks train the same small GPT; rank 1 is killed several times, half way between two saves,
some seconds after the last start and not before the processes that stand by are ready. Measured is
what each way does by itself: the seconds until a step is done again, until the first step that had
not been done before, and how many steps were done twice.

    python benchmarks/recovery.py [--kills 5] [--every 40] [--only NAME]...
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from dataclasses import asdict
from pathlib import Path

from checkpointing import report
from recovering.phases import spent
from recovering.racing import Kill, Race, StandsStill, Way, paceline, torchrun

from paceline.testing.processes import is_alive

WAYS = [
    Way("Paceline, memory k=1", paceline({"checkpoint": {"memory_every": 1}}), spent, standbys=2),
    Way("Paceline, disk only", paceline({}), spent, standbys=2),
    Way("Paceline, disk, no standby", paceline({"launch": {"standby": False}}), spent),
    Way("torchrun + torch.save", torchrun("recovering.plain")),
    Way("Accelerate", torchrun("recovering.with_accelerate")),
    Way("Lightning", torchrun("recovering.with_lightning")),
]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=40, help="steps between two saves")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds from start to kill")
    parser.add_argument("--only", action="append", help="only ways with this in their names")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [w for w in WAYS if not options.only or any(name in w.name for name in options.only)]
    results: dict[str, list[Kill]] = {}
    left: list[int] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as base:
        for number, way in enumerate(chosen):
            race = Race(way, Path(base) / str(number), options.every)
            with race.going(), report.progress(way.name, options.kills) as advance:
                results[way.name] = []
                with contextlib.suppress(StandsStill):
                    for _ in range(options.kills):
                        results[way.name].append(race.kill(options.settle))
                        advance()
            if len(results[way.name]) < options.kills:
                report.console.print(f"{way.name}: did not go on by itself after the next kill")
            left += [pid for pid in race.processes() if is_alive(pid)]
    _show(results, options.every)
    report.console.print(f"processes left over: {left or 'none'}")
    content = {name: [asdict(kill) for kill in kills] for name, kills in results.items()}
    report.write("recovery", {"every": options.every, "kills": content}, options.json)


def _show(results: dict[str, list[Kill]], every: int) -> None:
    rows = []
    for name, kills in results.items():
        if not kills:
            continue
        seconds = [kill.next_step for kill in kills]
        rows.append(
            (
                name,
                f"{report.median(seconds):.2f}",
                f"{min(seconds):.2f} … {max(seconds):.2f}",
                f"{report.median([kill.new_step for kill in kills]):.2f}",
                f"{report.median([kill.repeated for kill in kills]):g}",
                max(kill.repeated for kill in kills),
            )
        )
    report.show(
        f"SIGKILL of one rank of two, a save every {every} steps, median of kills",
        ["", "s to next step", "range", "s to first new step", "steps repeated", "most"],
        rows,
    )
    phases = {name: kills for name, kills in results.items() if any(k.phases for k in kills)}
    if phases:
        columns = list(dict.fromkeys(p for ks in phases.values() for k in ks for p in k.phases))
        report.show(
            "Where the seconds to the next step went, median",
            ["", *columns],
            [
                (
                    name,
                    *(
                        f"{report.median([kill.phases.get(column, 0.0) for kill in kills]):.2f}"
                        for column in columns
                    ),
                )
                for name, kills in phases.items()
            ],
        )


if __name__ == "__main__":
    main()
