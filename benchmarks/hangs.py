"""Planted hangs: are the right ranks and calls named, and how soon? Is a healthy run left alone?

    python benchmarks/hangs.py                   # every plant in hanging/plants.py
    python benchmarks/hangs.py --only stopped
    python benchmarks/hangs.py --healthy 10      # minutes with one slow rank: no alarm may come

Ranks are real processes of ``paceline.launch``. A plant that Gloo turns into the end of a rank (a
peer that left, a size mismatch) must be named in the launcher's error instead.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from hanging.expected import EXPECTED, Expected

from paceline.diagnose.hangs.diagnosis import HangDiagnosis
from paceline.diagnose.hangs.oversee import HangOverseer
from paceline.errors import RankFailed
from paceline.launch.hang_watcher import DetectedHang
from paceline.launch.job import LocalJob
from paceline.launch.local import launch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hangs.json"
AFTER = 3.0


class FirstFinding(HangOverseer):
    """Keeps findings, with the time, and ends the launch after the first."""

    def __init__(self, *, ends: bool = True) -> None:
        super().__init__(action="stop", say=None)
        self.ends = ends
        self.found: list[tuple[float, HangDiagnosis]] = []

    def tell(self, news: Any) -> None:
        """Keep it."""
        if isinstance(news, HangDiagnosis):
            self.found.append((time.time(), news))

    def look(self) -> DetectedHang | None:
        """End the launch: what there was to see has been seen."""
        if not self.found or not self.ends:
            return None
        finding = self.found[0][1]
        return DetectedHang("stop", finding.summary, list(finding.ranks), finding.step)


def run(script: Path, argument: str, size: int, overseer: FirstFinding) -> tuple[str, float]:
    """Launch a script; the error that ended it and the time at which the harm was done."""
    with tempfile.TemporaryDirectory() as folder:
        job = LocalJob(
            command=["script", str(script), argument],
            nproc=size,
            log_dir=Path(folder),
            grace=1.0,
            env={"PACELINE_HANG_AFTER": str(AFTER), "OMP_NUM_THREADS": "1"},
            output=None,
            notice=lambda message: None,
            hang_watcher=lambda: overseer,
        )
        error = ""
        try:
            launch(job)
        except RankFailed as failure:
            error = str(failure)
        logs = [path.read_text(errors="replace") for path in Path(folder).rglob("rank*.log")]
        planted = [float(m) for log in logs for m in re.findall(r"planted at ([\d.]+)", log)]
        return error, max(planted, default=0.0)


def judge(name: str, expected: Expected) -> dict[str, Any]:
    """Run one plant and compare what was said with what should have been."""
    overseer = FirstFinding()
    error, planted = run(HERE / "hanging" / "plants.py", name, expected.size, overseer)
    if expected.kind == "ends":
        said, kind, ranks, seconds = error, "ends", expected.ranks, 0.0
    elif overseer.found:
        told, finding = overseer.found[0]
        said, kind, ranks = finding.detail, finding.what, finding.ranks
        seconds = told - planted
    else:
        said, kind, ranks, seconds = error or "nothing", "nothing", (), 0.0
    right = kind == expected.kind and ranks == expected.ranks
    right = right and all(words in said for words in expected.words)
    return {
        "plant": name,
        "kind": kind,
        "ranks": list(ranks),
        "seconds": round(seconds, 1),
        "right": right and seconds <= 2 * AFTER,
        "said": said if not right else said.splitlines()[0],
    }


def healthy(minutes: float) -> dict[str, Any]:
    """A run with one slow rank, and how many alarms it set off."""
    overseer = FirstFinding(ends=False)
    error, _ = run(HERE / "hanging" / "healthy.py", str(60 * minutes), 2, overseer)
    assert not error, error
    said = [finding.summary for _, finding in overseer.found]
    return {"minutes": minutes, "alarms": len(said), "said": said}


def main() -> None:
    """Print a table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=EXPECTED, help="these plants alone")
    parser.add_argument("--healthy", nargs="?", type=float, const=10.0, metavar="MINUTES")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.healthy:
        results["healthy"] = healthy(options.healthy)
        print(f"{options.healthy:g} healthy minutes: {results['healthy']['alarms']} alarms")
        print("\n".join(results["healthy"]["said"]))
    else:
        rows = []
        print(f"{'plant':24} {'found':10} {'ranks':10} {'after':>6}")
        for name in options.only or EXPECTED:
            row = judge(name, EXPECTED[name])
            rows.append(row)
            verdict = "right" if row["right"] else f"WRONG: {row['said']}"
            ranks = ",".join(map(str, row["ranks"]))
            after = f"{row['seconds']:.1f} s" if row["seconds"] else "-"
            print(f"{name:24} {row['kind']:10} {ranks:10} {after:>6}  {verdict}", flush=True)
        right = sum(row["right"] for row in rows)
        print(f"{right} of {len(rows)} named right, t = {AFTER:g} s")
        if not options.only:
            results["plants"], results["after"] = rows, AFTER
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
