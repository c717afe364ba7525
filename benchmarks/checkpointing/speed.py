"""What the ranks of checkpoint_speed.py measure. All functions are called by all ranks at once."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from checkpointing.forks import Here
from checkpointing.rivals import quiet, shards_of
from checkpointing.states import Shapes, own_rows, state_of
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import XXH3, BlockHasher, Digest, hashed, make_digest, with_key
from paceline.checkpoint.sharded.async_saver import AsyncSaver
from paceline.checkpoint.sharded.save_load import load, save
from paceline.checkpoint.storage.open import open_storage
from paceline.checkpoint.tensor_bytes import memory_of

DROP = Path("/proc/sys/vm/drop_caches")
Times = dict[str, list[float]]
_KEY = "env:PACELINE_BENCHMARK_KEY"
os.environ.setdefault("PACELINE_BENCHMARK_KEY", "any key takes as long")


class Bench:
    """A rank with its rows of the state."""

    def __init__(self, here: Here, root: str, shapes: Shapes) -> None:
        torch.set_num_threads(max((os.cpu_count() or 1) // here.world, 1))
        self.here, self.root, self.shapes = here, Path(root), shapes
        self.group = here.group(timeout=300)
        self.rows = own_rows(shapes, here.rank, here.world)
        self.times: Times = defaultdict(list)

    def together(self) -> None:
        """Wait for the others."""
        if self.group is not None:
            dist.barrier(self.group)

    def calm(self, *remove: Path) -> None:
        """Let the disk finish what it was given, so that nobody pays for what came before."""
        self.together()
        if self.here.rank == 0:
            for path in remove:
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
        self.together()

    def slowest(self, name: str, seconds: float) -> None:
        """Note a time: that of the slowest rank, for which all wait."""
        if self.group is not None:
            told = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(told, dist.ReduceOp.MAX, self.group)
            seconds = told.item()
        self.times[name].append(seconds)

    def timed(self, name: str, action: Callable[[], Any]) -> None:
        """Note how long ``action`` takes."""
        self.together()
        began = time.perf_counter()
        action()
        self.slowest(name, time.perf_counter() - began)


def stalls(here: Here, root: str, shapes: Shapes, repeats: int) -> Times:
    """How long training stands still for a save; and how long the save takes in all."""
    bench = Bench(here, root, shapes)
    rows = bench.rows
    alone = here.world == 1
    sharded: dict[str, Any] = dict(rows) if alone else shards_of(rows, shapes, here)
    state = state_of(rows, shapes, here.rank, here.world)
    own, others = bench.root / "own", bench.root / "others"
    saver = AsyncSaver(Folder(own), here.group(timeout=300), None)
    saver.reserve(state)
    stager = default_stager()
    dcp_group = here.group(timeout=300)
    kind = dict(no_dist=True) if alone else dict(process_group=dcp_group)

    def torch_save() -> None:
        others.mkdir(parents=True, exist_ok=True)
        bench.together()
        began = time.perf_counter()
        with open(others / f"rank-{here.rank}.pt", "wb") as file:
            torch.save(rows, file)
            file.flush()
            bench.slowest("torch.save", time.perf_counter() - began)
            began = time.perf_counter()
            os.fsync(file.fileno())
        total = bench.times["torch.save"][-1] + time.perf_counter() - began
        bench.slowest("torch.save and fsync", total)

    def paceline(step: int) -> None:
        bench.together()
        began = time.perf_counter()
        saver.save(step, state, {})
        bench.slowest("Paceline", time.perf_counter() - began)
        [outcome] = saver.wait()
        assert outcome.error is None, outcome.error
        bench.slowest("Paceline, all", time.perf_counter() - began)

    def async_save(name: str, **more: Any) -> None:
        bench.together()
        began = time.perf_counter()
        with quiet():
            answer = dcp.async_save(
                sharded, storage_writer=dcp.FileSystemWriter(others), **kind, **more
            )
            if not isinstance(answer, Future):  # until it is staged the state must not change
                answer.staging_completion.result()
            bench.slowest(name, time.perf_counter() - began)
            (answer if isinstance(answer, Future) else answer.upload_completion).result()
        bench.slowest(f"{name}, all", time.perf_counter() - began)

    for step in range(repeats + 1):
        torch_save()
        bench.calm(others)
        paceline(step)
        bench.calm(own)
        async_save("dcp.async_save")
        bench.calm(others)
        if stager is not None:
            async_save("dcp.async_save, DefaultStager", async_stager=stager)
            bench.calm(others)
    saver.close()
    if stager is not None:
        stager.close()
    return {name: values[1:] for name, values in bench.times.items()}  # the first warmed up


def default_stager() -> Any:
    """The stager torch recommends, as it can be used without a GPU; ``None`` where it has none."""
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    except ImportError:
        return None
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def writes(here: Here, root: str, shapes: Shapes, repeats: int) -> Times:
    """Writing this rank's bytes to a file, flushed to disk, hashed in each way and not."""
    bench = Bench(here, root, shapes)
    storage = open_storage(root)
    views = [memory_of(tensor) for tensor in bench.rows.values()]
    file = f"rank-{here.rank}.bin"

    def plain() -> None:
        storage.create(file, hashed(views, _NoHasher()))

    def hashing(digest: Digest) -> None:
        storage.create(file, hashed(views, BlockHasher(digest=digest)))

    def hash_alone(digest: Digest) -> None:
        for _ in hashed(views, BlockHasher(digest=digest)):
            pass

    others = {"blake2b": make_digest("blake2b"), "blake2b with a key": with_key(_KEY)}
    cases = [("write", plain), ("write and hash", partial(hashing, XXH3))]
    cases += [(f"write and {name}", partial(hashing, digest)) for name, digest in others.items()]
    for turn in range(2 * repeats):  # each goes first as often as the other
        for name, action in cases if turn % 2 else cases[::-1]:
            bench.timed(name, action)
            storage.delete(file)
            bench.calm()
        bench.timed("hash", partial(hash_alone, XXH3))
        for name, digest in others.items():
            bench.timed(name, partial(hash_alone, digest))
    return dict(bench.times)


class _NoHasher(BlockHasher):
    """The same chunks, and no hashes."""

    def update(self, data: memoryview | bytes | bytearray) -> None:
        """Look away."""


def loads(here: Here, root: str, shapes: Shapes, repeats: int) -> Times:
    """Loading what this rank needs, verified, beside reading the same files into memory."""
    bench = Bench(here, root, shapes)
    folder = Folder(bench.root)
    state = state_of(bench.rows, shapes, here.rank, here.world)
    checkpoint = save(folder, 1, state, info={}, group=bench.group)
    name = next(file for file in checkpoint.manifest.files if file.startswith(_own(here)))
    path = Path(checkpoint.path) / name
    buffer = torch.zeros(path.stat().st_size, dtype=torch.uint8)

    def plain() -> None:
        view = memory_of(buffer)
        with open(path, "rb", buffering=0) as file:
            while len(view):
                view = view[file.readinto(view) :]

    def verified() -> None:
        load(folder.get(1), state.tensors, bench.group)

    for turn in range(2 * repeats):
        cases = [("read", plain), ("load", verified)]
        for case, action in cases if turn % 2 else cases[::-1]:
            bench.timed(f"{case}, warm", action)
            if turn < repeats and os.access(DROP, os.W_OK):
                bench.together()
                if here.rank == 0:
                    DROP.write_text("1")
                bench.timed(f"{case}, cold", action)
    return dict(bench.times)


def _own(here: Here) -> str:
    return f"rank-{here.rank:05d}-"
