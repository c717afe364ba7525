"""How long the command line takes to answer, and importing Paceline takes: a table and JSON.

    python benchmarks/startup.py [--repeat N]

Each line is a fresh process, measured from start to exit, the median of N; "over bare Python" is
that less what `python -c pass` takes. `import torch` is there for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "startup.json"
CLI = ["-c", "from paceline.cli import main; main()"]
BARE = "python -c pass"
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    BARE: (["-c", "pass"], None),
    "import paceline": (["-c", "import paceline"], 0.1),
    "paceline --help": ([*CLI, "--help"], 0.3),
    "paceline --version": ([*CLI, "--version"], 0.3),
    "paceline config check": ([*CLI, "config", "check"], None),
    "paceline config show": ([*CLI, "config", "show"], None),
    "import torch": (["-c", "import torch"], None),
}


def seconds(arguments: list[str], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    measured = {name: seconds(arguments, repeat) for name, (arguments, _) in COMMANDS.items()}
    print(f"{'':24}{'median s':>10}{'over bare Python':>18}{'goal':>8}")
    for name, (_, goal) in COMMANDS.items():
        took = measured[name]
        shown_goal = f"< {goal}" if goal else ""
        print(f"{name:24}{took:>10.3f}{took - measured[BARE]:>18.3f}{shown_goal:>8}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
