"""What saving and loading 1 GB costs, beside torch.save and torch.distributed.checkpoint.

Four things, by one rank and by two that hold half the state each. (a) How long training stands
still for a save: Paceline's, a torch.save by every rank of its part, and dcp.async_save on a group
of its own, with its default and with its DefaultStager; they take turns. (b) Writing with and
without hashing. (c) Loading with verification beside reading the same files into memory, from the
page cache and, where it may be emptied, from the disk. (d) With --cuda: how long a training step of
a 1.3B GPT stands still.

    python benchmarks/checkpoint_speed.py [--gigabytes 1] [--repeats 4] [--root FOLDER]
    python benchmarks/checkpoint_speed.py --cuda [--layers 24] [--width 2048]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpointing import report, speed
from checkpointing.forks import results
from checkpointing.states import gpt_shapes, size_of

STALL, HASHING, LOADING = 0.1, 1.1, 0.5
"""Targets: stall to torch.save, hashed to plain write, speed of a load to that of a read."""


def shapes_of(gigabytes: float) -> Any:
    """A GPT of width 768 with Adam of about this size."""
    layers = max(round(gigabytes * 1e9 / (12 * 12 * 768**2)), 1)
    return gpt_shapes(layers, 768)


def measure(options: argparse.Namespace, world: int) -> dict[str, speed.Times]:
    """All times of one number of ranks."""
    shapes = shapes_of(options.gigabytes)
    found = {}
    for name in options.parts.split(","):
        with tempfile.TemporaryDirectory(dir=options.root) as root:
            function = getattr(speed, name)
            # All ranks note the time of the slowest.
            found[name] = results(function, world, root, shapes, options.repeats, timeout=600)[0]
    return found


def tell_stalls(times: speed.Times, world: int, size: int) -> dict[str, Any]:
    base = times["torch.save"]
    rows = []
    for name, values in times.items():
        if name.endswith(", all"):
            continue
        whole = times.get(f"{name}, all", values)
        ratio = report.median_ratio(values, base)
        rows.append(
            [name, f"{report.median(values):.3f}", f"{ratio:.3f}", f"{report.median(whole):.2f}"]
        )
    report.show(
        f"(a) {_title(world, size)}: training stands still",
        ["", "seconds (median)", "ratio to torch.save", "until it is saved, s"],
        rows,
    )
    ratio = report.median_ratio(times["Paceline"], base)
    return _verdict("stall", ratio, STALL, ratio <= STALL)


def tell_writes(times: speed.Times, world: int, size: int) -> dict[str, Any]:
    plain = times["write"]
    rows = [
        [name, f"{report.median(values):.3f}", f"{size / report.median(values) / 1e9:.2f}"]
        for name, values in times.items()
    ]
    report.show(f"(b) {_title(world, size)}", ["", "seconds (median)", "GB/s"], rows)
    ratio = report.median_ratio(times["write and hash"], plain)
    return _verdict("write with hashing to write without", ratio, HASHING, ratio <= HASHING)


def tell_loads(times: speed.Times, world: int, size: int) -> dict[str, Any]:
    rows, found = [], {}
    for state in ("warm", "cold"):
        if f"read, {state}" not in times:
            continue
        read, load = times[f"read, {state}"], times[f"load, {state}"]
        ratio = report.median_ratio(read, load)
        found |= _verdict(f"load to read, {state}", ratio, LOADING, ratio >= LOADING)
        rows.append(
            [
                "page cache" if state == "warm" else "disk",
                f"{size / report.median(read) / 1e9:.2f}",
                f"{size / report.median(load) / 1e9:.2f}",
                f"{ratio:.2f}",
            ]
        )
    columns = ["from", "read, GB/s", "load with verification, GB/s", "ratio"]
    report.show(f"(c) {_title(world, size)}", columns, rows)
    return found


def _title(world: int, size: int) -> str:
    ranks = "one rank" if world == 1 else f"{world} ranks"
    return f"{size / 1e9:.2f} GB on {ranks}, load average {report.load_average()}"


def _verdict(name: str, ratio: float, target: float, met: bool) -> dict[str, Any]:
    report.console.print(f"{name}: {ratio:.3f} (target {target}: {report.verdict(met)})")
    return {name: {"ratio": ratio, "target": target, "met": met}}


TELL = {"stalls": tell_stalls, "writes": tell_writes, "loads": tell_loads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks")
    parser.add_argument("--parts", default="stalls,writes,loads")
    parser.add_argument("--root", help="a folder on the disk to be measured")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cuda", action="store_true", help="stall of a training step on a GPU")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if options.cuda:
        from checkpointing.cuda import stall_of_a_step

        stall_of_a_step(options)
        return
    size = size_of(shapes_of(options.gigabytes))
    began = time.perf_counter()
    content: dict[str, Any] = {"options": vars(options) | {"json": None}, "bytes": size}
    for world in map(int, options.worlds.split(",")):
        times = measure(options, world)
        verdicts: dict[str, Any] = {}
        for name, found in times.items():
            verdicts |= TELL[name](found, world, size)
        content[f"{world} ranks"] = {"seconds": times, "targets": verdicts}
    content["seconds"] = time.perf_counter() - began
    report.write("checkpoint_speed", content, options.json)


if __name__ == "__main__":
    main()
