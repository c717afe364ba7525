"""What a shuffled order costs to open in its middle: Paceline's against torch's DistributedSampler.

Each case runs in a process of its own: make the order, go to the middle of epoch 3, draw 1,000
indices. Time is wall time, first use included; memory is the growth of the peak resident set.

    python benchmarks/data_order.py
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "data_order.json"
DRAWN = 1000
TARGET_MS, TARGET_MB = 50.0, 10.0
# What DistributedSampler needs a sample: a tensor entry, a list entry and a Python int.
SAMPLER_BYTES = 60


def paceline_order(n: int) -> None:
    from paceline.data import Order

    indices = Order(n, seed=1).indices(3, n // 2, n // 2 + DRAWN)
    assert indices.shape == (DRAWN,)


def torch_sampler(n: int) -> None:
    from itertools import islice

    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(n), num_replicas=1, rank=0, seed=1)
    sampler.set_epoch(3)
    assert len(list(islice(iter(sampler), n // 2, n // 2 + DRAWN))) == DRAWN


CASES = {"Paceline Order": paceline_order, "torch DistributedSampler": torch_sampler}


def peak_resident_mb() -> float:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except OSError:  # not Linux: the peak since the process began
        scale = 1024**2 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def forget_peak() -> None:
    """Let the peak start from what is resident now, so that imports do not hide the case."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, n: int) -> dict[str, float]:
    """Run in the child: the imports are everybody's, the rest is the case's."""
    import torch  # noqa: F401
    from torch.utils.data import DistributedSampler  # noqa: F401

    import paceline.data  # noqa: F401

    forget_peak()
    before = peak_resident_mb()
    start = time.perf_counter()
    CASES[name](n)
    first_ms = 1000 * (time.perf_counter() - start)
    resident_mb = peak_resident_mb() - before
    start = time.perf_counter()
    CASES[name](n)
    again_ms = 1000 * (time.perf_counter() - start)
    result = {"first_ms": first_ms, "again_ms": again_ms, "resident_mb": resident_mb}
    if name == "Paceline Order":  # tracing every object of the other would take minutes
        tracemalloc.start()
        CASES[name](n)
        result["python_mb"] = tracemalloc.get_traced_memory()[1] / 2**20
    return result


def available_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 4 * 2**30
    return int(text.split("MemAvailable:")[1].split()[0]) * 1024


def in_a_child(name: str, n: int) -> dict[str, float]:
    child = [sys.executable, __file__, "--case", name, str(n)]
    return json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    cases = [("Paceline Order", n) for n in (10**6, 10**9, 10**12)]
    cases += [
        ("torch DistributedSampler", n)
        for n in (10**6, 10**7, 10**8)
        if SAMPLER_BYTES * n < available_bytes() / 2
    ]
    rows = [{"order": name, "samples": n, **in_a_child(name, n)} for name, n in cases]
    table = Table("order", "samples", "first use ms", "again ms", "peak MB")
    for row in rows:
        table.add_row(
            str(row["order"]),
            f"{row['samples']:,}",
            f"{row['first_ms']:,.1f}",
            f"{row['again_ms']:,.1f}",
            f"{row['resident_mb']:,.1f}",
        )
    console = Console()
    console.print(table)
    billion = next(row for row in rows if row["samples"] == 10**9)
    met = billion["first_ms"] < TARGET_MS and billion["resident_mb"] < TARGET_MB
    console.print(
        f"10^9 samples: {billion['first_ms']:.1f} ms, {billion['resident_mb']:.1f} MB "
        f"(target under {TARGET_MS:.0f} ms and {TARGET_MB:.0f} MB: {'met' if met else 'MISSED'})"
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"drawn": DRAWN, "target_met": met, "rows": rows}, indent=2))
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
