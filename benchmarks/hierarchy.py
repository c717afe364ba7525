"""Sums in two levels against one ring, and tuned buckets: two hosts with two ranks each.

Hosts are network namespaces of this machine, joined by a link of a certain rate. All ways train the
same small GPT in turns within one run, so that whatever else the machine does hits all of them.
Bytes are those of the host's interface, by the kernel's counter.

    python benchmarks/hierarchy.py                       # 100 Mbit/s, 1 Gbit/s, 5 ms, no limit
    python benchmarks/hierarchy.py --links 100 1000:5    # Mbit/s, and milliseconds each way
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline import Reduction
from paceline.models import GPT, token_cross_entropy
from paceline.testing.hosts import Hosts

RESULTS = Path(__file__).parent / "results" / "hierarchy.json"
PORT = 29500
NODES, LOCAL = 2, 2
WAYS = {
    "one ring": Reduction(hierarchy="never"),
    "two levels": Reduction(hierarchy="always"),
    "auto": Reduction(),
    "auto, tuned": Reduction(bucket_mib="tuned"),
    "no overlap": Reduction(hierarchy="never", overlap=False),
}
LINKS = ("100", "1000", "1000:5", "0")
_TO_SETTLE = 6  # choosing happens at the first step, tuning after the fourth


@dataclass(frozen=True)
class Row:
    """A way at one link."""

    way: str
    step_s: float
    faster: float
    """The step time of one ring, divided by this one's."""
    mbytes_a_node: float
    """What a node sends to the other in a step, by the kernel."""
    said: list[str]


def train_in_turns(turns: int, steps: int) -> list[Row]:
    """On each rank: step times and bytes of all ways."""
    world = paceline.World.init()
    engines = {name: _engine(world, reduction) for name, reduction in WAYS.items()}
    batch = _batch(world)
    for engine in engines.values():
        _turn(functools.partial(engine.step, batch), _TO_SETTLE)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    sent: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(turns):
        names = list(WAYS) if number % 2 else list(WAYS)[::-1]
        for name in names:
            took, bytes_sent = _turn(functools.partial(engines[name].step, batch), steps)
            seconds[name].append(took)
            sent[name].append(bytes_sent)
    rows = []
    for name, engine in engines.items():
        ratios = [one / own for one, own in zip(seconds["one ring"], seconds[name], strict=True)]
        rows.append(
            Row(
                name,
                step_s=statistics.median(seconds[name]),
                faster=statistics.median(ratios),
                mbytes_a_node=statistics.median(sent[name]) / 1e6,
                said=engine.take_notes(),
            )
        )
    return rows


def _engine(world: paceline.World, reduction: Reduction) -> paceline.Engine:
    torch.manual_seed(0)
    model = GPT(vocab_size=256, context=64, layers=6, heads=4, width=256)
    return paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        layout=f"dp={world.size}",
        reduction=reduction,
    )


def _batch(world: paceline.World) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, 256, (2, 65), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _turn(step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Seconds that a step takes, over a few, and bytes that this host sends."""
    dist.barrier()
    before, began = _sent_by_host(), time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / steps, (_sent_by_host() - before) / steps


def _sent_by_host() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def measure(link: str, turns: int, steps: int) -> list[dict[str, Any]]:
    """All ways between two hosts joined by ``link``; rank 0 tells."""
    megabits, _, delay = link.partition(":")
    command = [sys.executable, __file__, "--rank", "--turns", str(turns), "--steps", str(steps)]
    with Hosts(NODES) as hosts:
        if float(megabits):
            hosts[0].rate(float(megabits))
        if delay:
            hosts[0].delay(float(delay))
        ranks = []
        for rank in range(NODES * LOCAL):
            node, place = divmod(rank, LOCAL)
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(NODES * LOCAL),
                "LOCAL_RANK": str(place),
                "LOCAL_WORLD_SIZE": str(LOCAL),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(NODES),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            ranks.append(hosts[node].popen(command, env=environment, stdout=out, text=True))
        told, _ = ranks[0].communicate()
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"a rank failed at {link}")
    rows: list[dict[str, Any]] = json.loads(told.splitlines()[-1])
    return rows


def show(link: str, rows: list[dict[str, Any]]) -> None:
    """One link's table."""
    megabits, _, delay = link.partition(":")
    rate = f"{megabits} Mbit/s" if float(megabits) else "no limit"
    print(f"\n{rate}{f', {delay} ms each way' if delay else ''}")
    print(f"  {'':12} {'step':>9} {'faster':>8} {'MB a node':>10}")
    for row in rows:
        print(
            f"  {row['way']:12} {1e3 * row['step_s']:6.0f} ms {row['faster']:7.2f}x "
            f"{row['mbytes_a_node']:10.1f}"
        )
        for said in row["said"]:
            print(f"      {said}")


def main() -> None:
    """Print tables and write them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="MBIT[:MS]")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rows = train_in_turns(options.turns, options.steps)
        if dist.get_rank() == 0:
            print(json.dumps([asdict(row) for row in rows]))
        return
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for link in options.links:
        results[link] = measure(link, options.turns, options.steps)
        show(link, results[link])
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
