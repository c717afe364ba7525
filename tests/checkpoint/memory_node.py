"""A node of its own: a process that forks ranks, with a /dev/shm that nobody else sees.

Started as ``unshare --mount python memory_node.py``; takes one command a line (JSON) on stdin and
answers with one line on stdout. Where it is killed, its shared memory is gone, like that of a
machine that lost its power.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from checkpoint.memory_cases import group, recall, state
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.world import World

SHARED = "/dev/shm"


def train(after: int | None, steps: int) -> str:
    """Take ``steps`` snapshots, then stand still until killed."""
    tier = MemorySnapshots("run", group(), after=after)
    for step in range((after or 0) + 1, (after or 0) + 1 + steps):
        tier.snapshot(step, state(step), {"reason": "test"})
    tier.wait()
    say(f"partner {tier.partner}")
    while True:
        time.sleep(60)


def finish(after: int) -> str:
    tier = MemorySnapshots("run", group(), after=after)
    tier.snapshot(after + 1, state(after + 1))
    tier.snapshot(after + 2, state(after + 2))
    tier.free()
    return "freed"


def restore() -> str:
    found = recall([SHARED])
    return "nothing" if found is None else f"{found[0]}: step {found[1]}"


def run_rank(command: dict[str, Any]) -> None:
    os.environ.update(command["environment"])
    with World.init(timeout=120):
        say({"train": train, "finish": finish, "restore": restore}[command["do"]](*command["with"]))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", SHARED], check=True)
    torch.set_num_threads(1)
    say("ready")
    child = 0
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "kill":
            os.kill(child, signal.SIGKILL)
            say(f"ended by {-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
        elif command["do"] == "list":
            say(" ".join(sorted(os.listdir(SHARED))) or "empty")
        else:
            child = os.fork()
            if child == 0:
                try:
                    run_rank(command)
                except BaseException as error:  # nobody must wait for an answer in vain
                    say(f"{type(error).__name__}: {error}".replace("\n", " "))
                os._exit(0)
            if command["do"] != "train":
                os.waitpid(child, 0)


if __name__ == "__main__":
    main()
