"""Hangs on purpose: ``python plants.py NAME`` on every rank of a launch.

Each plant lets all ranks go through a few good collectives, then does its harm. Ranks meet through
plain ``torch.distributed`` calls, as a program of anybody's would.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.world import World

PLANTS: dict[str, Callable[[World], None]] = {}
STEPS_BEFORE = 3


def plant(function: Callable[[World], None]) -> Callable[[World], None]:
    """Put a plant on the list."""
    PLANTS[function.__name__] = function
    return function


def together(value: float = 1.0, size: int = 8) -> torch.Tensor:
    """One good collective."""
    tensor = torch.full((size,), value)
    dist.all_reduce(tensor)
    return tensor


def say_planted() -> None:
    """Note the time of the harm."""
    print(f"planted at {time.time()}", flush=True)


def forever() -> None:
    """Wait without end."""
    while True:
        time.sleep(0.5)


@plant
def busy_loop(world: World) -> None:
    """Rank 1 computes in a loop that never ends."""
    if world.rank == 1:
        total = 0
        while True:
            total += 1
    together(size=32)


@plant
def sleeping(world: World) -> None:
    """Rank 0 sleeps."""
    if world.rank == 0:
        forever()
    together(size=16)


@plant
def held_lock(world: World) -> None:
    """Rank 1 waits for a lock of its own that nobody gives back."""
    lock = threading.Lock()
    lock.acquire()
    if world.rank == 1:
        lock.acquire()
    dist.broadcast(torch.ones(4), 0)


class StuckDataset(torch.utils.data.Dataset[torch.Tensor]):
    """Good samples up to one that never comes."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stuck and index >= 4:
            forever()
        return torch.ones(4)


@plant
def data_loading(world: World) -> None:
    """Rank 1's dataset never returns a sample."""
    for batch in torch.utils.data.DataLoader(StuckDataset(world.rank == 1), batch_size=2):
        dist.all_reduce(batch)


@plant
def loader_worker(world: World) -> None:
    """A worker process of rank 0's loader never returns a batch."""
    loader = torch.utils.data.DataLoader(
        StuckDataset(world.rank == 0), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    for batch in loader:
        dist.all_reduce(batch)


@plant
def reading_pipe(world: World) -> None:
    """Rank 1 reads from a named pipe that nobody writes to."""
    if world.rank == 1:
        path = os.path.join(tempfile.mkdtemp(), "pipe")
        os.mkfifo(path)
        with open(path) as file:
            file.read()
    together()


@plant
def reading_socket(world: World) -> None:
    """Rank 0 waits for an answer over the network."""
    if world.rank == 0:
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        client.recv(1)
    together()


@plant
def stopped(world: World) -> None:
    """Rank 1 is stopped by a signal."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    together()


@plant
def native_code(world: World) -> None:
    """Rank 1 is in native code that keeps the interpreter."""
    if world.rank == 1:
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)  # never comes back, nor does the interpreter
    together(size=64)


@plant
def skipped_call(world: World) -> None:
    """Rank 1 leaves a barrier out, and then waits for something else on its own."""
    if world.rank != 1:
        dist.barrier()
    threading.Event().wait()


@plant
def hook_in_backward(world: World) -> None:
    """Rank 1 is stuck in a hook that its backward calls, under DDP."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    if world.rank == 1:
        # The first use of DDP imports for seconds: the harm is done when the hook is reached.
        model.module.weight.register_hook(lambda grad: (say_planted(), forever()))
    model(torch.ones(2, 64)).sum().backward()


@plant
def other_op(world: World) -> None:
    """Rank 1 is at a barrier where rank 0 gathers."""
    if world.rank == 0:
        dist.all_gather([torch.zeros(4) for _ in range(world.size)], torch.ones(4))
    else:
        dist.barrier()
        dist.barrier()


@plant
def swapped_order(world: World) -> None:
    """Ranks call the same two collectives in different order."""
    calls = [dist.barrier, lambda: dist.broadcast(torch.ones(16), 0)]
    for call in calls if world.rank == 0 else reversed(calls):
        call()
    dist.barrier()


@plant
def other_dtype(world: World) -> None:
    """Rank 1 reduces integers where rank 0 reduces floats: nothing hangs, all is garbage."""
    for _ in range(200):
        dist.all_reduce(torch.ones(8, dtype=torch.int32 if world.rank else torch.float32))
        time.sleep(0.1)


@plant
def two_groups(world: World) -> None:
    """Ranks 0 and 1 share two groups and enter them in different order."""
    ranks = list(range(world.size))
    first, second = dist.new_group(ranks), dist.new_group(ranks)
    order = (first, second) if world.rank == 0 else (second, first)
    for group in order:
        dist.all_reduce(torch.ones(4), group=group)


@plant
def three_in_a_ring(world: World) -> None:
    """Three ranks, three groups of two: everyone waits for the next."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    mine = {0: [0, 2], 1: [1, 0], 2: [2, 1]}[world.rank]
    for index in mine:
        dist.all_reduce(torch.ones(4), group=groups[index])


@plant
def no_sender(world: World) -> None:
    """Rank 0 receives from rank 1, which sends nothing."""
    if world.rank == 0:
        dist.recv(torch.zeros(4), 1)
    else:
        forever()


@plant
def both_receive(world: World) -> None:
    """Each of two ranks waits for a message of the other."""
    dist.recv(torch.zeros(4), 1 - world.rank)


@plant
def message_and_collective(world: World) -> None:
    """Rank 0 receives from rank 1, which is in a collective."""
    if world.rank == 0:
        dist.recv(torch.zeros(4), 1)
    else:
        together()


@plant
def left_early(world: World) -> None:
    """Rank 1 leaves the world, with success, while rank 0 waits for it."""
    if world.rank == 1:
        world.close()
        return
    together(size=128)


@plant
def exited(world: World) -> None:
    """Rank 1's process ends without a word."""
    if world.rank == 1:
        os._exit(0)
    together(size=256)


@plant
def other_size(world: World) -> None:
    """Rank 1 brings more than rank 0: Gloo ends such a process."""
    dist.all_reduce(torch.ones(64 if world.rank == 0 else 8192))


@plant
def subgroup_of_four(world: World) -> None:
    """Rank 3 does not come to a group of ranks 2 and 3; 0 and 1 wait for 2 in another."""
    pair, rest = dist.new_group([2, 3]), dist.new_group([0, 1, 2])
    if world.rank == 3:
        forever()
    if world.rank == 2:
        dist.all_reduce(torch.ones(4), group=pair)
    dist.broadcast(torch.ones(4), 2, group=rest)


@plant
def checkpoint(world: World) -> None:
    """Rank 0 saves to a place that does not answer."""
    if world.rank == 0:
        path = os.path.join(tempfile.mkdtemp(), "model.pt")
        os.mkfifo(path)
        torch.save({"weight": torch.ones(4)}, path)
    dist.barrier()


def main() -> None:
    """Run the plant named on the command line."""
    world = paceline.World.init()
    for step in range(STEPS_BEFORE):
        together(float(step))
    say_planted()
    PLANTS[sys.argv[1]](world)
    print(f"rank {world.rank} came through")


if __name__ == "__main__":
    main()
