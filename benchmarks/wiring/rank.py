"""One rank of one training, as a program: trains until it is ended, and notes each step.

    python -m wiring.rank JOB.json          # RANK, WORLD_SIZE, MASTER_ADDR, … as torchrun sets them

Whoever started it holds the other end of its standard input; when that is gone, so is this.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wiring import ways
from wiring.task import Task
from wiring.ways import Way


def main() -> None:
    """See the module."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    way, task = Way(**job["way"]), Task(**job["task"])
    device = torch.device(job["device"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training = ways.build(way, task, device)
    evaluate_at = set(job["evaluate_at"])
    notes = open(path.with_name(f"rank{rank}.jsonl"), "w", buffering=1)  # noqa: SIM115

    def note(step: int, loss: float | None) -> None:
        seen: dict[str, Any] = {"step": step, "time": time.time(), "loss": loss}
        seen["kernel"], seen["packets"] = _sent_by_kernel()
        seen["counted"] = training.sent()
        if step in evaluate_at:
            seen["held_out"] = training.evaluate(task.validation(device))
        notes.write(json.dumps(seen) + "\n")

    dist.barrier()
    note(0, None)
    for step, (inputs, targets) in enumerate(task.batches(rank, size), 1):
        note(step, training.step((inputs.to(device), targets.to(device))))


def _sent_by_kernel() -> tuple[int, int]:
    """Bytes and packets that left by the interface that ranks talk over; the loopback counts not.

    From /proc, which shows the network of the process that asks; /sys shows that of whoever
    mounted it.
    """
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface != "lo":
            return int(numbers.split()[8]), int(numbers.split()[9])
    return 0, 0


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
