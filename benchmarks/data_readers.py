"""How fast samples are read: Paceline's loader beside torch's DataLoader, WebDataset and Streaming.

All read the same samples from local files, decode them alike and make the same batches, with the
same number of workers, in turns of one run. WebDataset and StreamingDataset (mosaicml-streaming)
take part where they are installed. What is counted is a whole epoch after one that is not.

    python benchmarks/data_readers.py [--workers 0 2] [--rounds 3] [--formats jsonl] [--small]

Also measured: how long a training loop whose step takes a given time waits for data.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import statistics
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from paceline.data import PackedTokens, loader, shards

RESULTS = Path(__file__).parent / "results" / "data_readers.json"
SHARDS, BATCH, CONTEXT = 16, 64, 512
STEP_S = 0.02

Epochs = Callable[[], Iterator[int]]
"""Iterating it once is an epoch: the samples of each batch."""


# ------------------------------------------------------------------ the data


def write_jsonl(folder: Path, samples: int) -> None:
    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        with open(folder / f"{shard:03d}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(samples // SHARDS):
                tokens = draw.integers(0, 50_000, 256).tolist()
                file.write(json.dumps({"tokens": tokens, "source": "web"}) + "\n")


def write_tar(folder: Path, samples: int) -> None:
    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as archive:
            for number in range(samples // SHARDS):
                array = io.BytesIO()
                np.save(array, draw.integers(0, 256, (3, 64, 64), dtype=np.uint8))
                parts = {"npy": array.getvalue(), "cls": str(number % 10).encode()}
                for ending, data in parts.items():
                    member = tarfile.TarInfo(f"{shard:03d}{number:06d}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def write_tokens(folder: Path, samples: int) -> None:
    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        tokens = draw.integers(1, 50_000, samples * CONTEXT // SHARDS, dtype=np.uint16)
        tokens[draw.integers(0, len(tokens), len(tokens) // 300)] = 0
        tokens.tofile(folder / f"{shard:03d}.bin")


def decode_json(sample: Any) -> torch.Tensor:
    return torch.tensor(sample["tokens"])


def decode_tar(sample: Any) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(sample["npy"]), sample["cls"]


# ------------------------------------------------------------------ the readers


def paceline_shards(files: list[str], decode: Any, workers: int) -> Epochs:
    data = loader(shards(files, map=decode), global_batch=BATCH, workers=workers, rank=0, size=1)
    return lambda: (len(first(batch)) for batch in data)


class ByWorker(IterableDataset[Any]):
    """As people write it for torch: each worker reads every n-th file from front to back."""

    def __init__(self, files: list[str], read: Any, decode: Any) -> None:
        self.files, self.read, self.decode = files, read, decode

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self.files if worker is None else self.files[worker.id :: worker.num_workers]
        for file in mine:
            yield from map(self.decode, self.read(file))


def read_jsonl(file: str) -> Iterator[Any]:
    with open(file, "rb") as lines:
        yield from map(json.loads, lines)


def read_tar(file: str) -> Iterator[Any]:
    sample: dict[str, Any] = {}
    with tarfile.open(file) as archive:
        for member in archive:
            key, _, ending = member.name.partition(".")
            data = archive.extractfile(member)
            assert data is not None
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            sample["__key__"] = key
            raw = data.read()
            sample[ending] = np.load(io.BytesIO(raw)) if ending == "npy" else int(raw)
    yield sample


def torch_files(read: Any, files: list[str], decode: Any, workers: int) -> Epochs:
    data = DataLoader(ByWorker(files, read, decode), BATCH, **kept(workers))
    return lambda: (len(first(batch)) for batch in data)


def webdataset_tar(files: list[str], decode: Any, workers: int) -> Epochs:
    import webdataset

    data = webdataset.WebDataset(files, shardshuffle=len(files), empty_check=False, seed=0)
    data = data.shuffle(128).decode().map(decode)
    batches = DataLoader(data, BATCH, **kept(workers))
    return lambda: (len(first(batch)) for batch in batches)


def streaming_tar(files: list[str], decode: Any, workers: int) -> Epochs:
    from streaming import MDSWriter, StreamingDataset

    folder = str(Path(files[0]).parent / "mds")
    if not Path(folder).exists():
        with MDSWriter(out=folder, columns={"npy": "ndarray", "cls": "int"}) as out:
            for file in files:
                for sample in read_tar(file):
                    out.write({"npy": sample["npy"], "cls": sample["cls"]})

    class Decoded(StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decode({"npy": sample["npy"].copy(), "cls": sample["cls"]})

    data = Decoded(local=folder, shuffle=True, batch_size=BATCH)
    batches = DataLoader(data, BATCH, **kept(workers))
    return lambda: (len(first(batch)) for batch in batches)


class Windows(Dataset[Any]):
    """As people write it for torch: windows of a memory-mapped file, without documents."""

    def __init__(self, files: list[str]) -> None:
        self.maps = [np.memmap(file, np.uint16, "r") for file in files]
        self.each = [(len(tokens) - 1) // CONTEXT for tokens in self.maps]

    def __len__(self) -> int:
        return sum(self.each)

    def __getitem__(self, index: int) -> Any:
        file = 0
        while index >= self.each[file]:
            index, file = index - self.each[file], file + 1
        part = self.maps[file][index * CONTEXT : (index + 1) * CONTEXT + 1].astype(np.int64)
        ends = np.concatenate([[False], part[:-1] == 0])
        documents = ends.cumsum()[:-1]
        places = np.arange(CONTEXT)
        positions = places - np.maximum.accumulate(np.where(ends[:-1], places, 0))
        targets = np.where(part[:-1] == 0, -100, part[1:])
        return tuple(map(torch.from_numpy, (part[:-1], positions, documents, targets)))


def paceline_tokens(files: list[str], decode: Any, workers: int) -> Epochs:
    packed = PackedTokens(files, CONTEXT, end=0)
    data = loader(packed, global_batch=BATCH, workers=workers, rank=0, size=1)
    return lambda: (len(first(batch)) for batch in data)


def torch_tokens(files: list[str], decode: Any, workers: int) -> Epochs:
    data = DataLoader(Windows(files), BATCH, shuffle=True, **kept(workers))
    return lambda: (len(first(batch)) for batch in data)


def kept(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "persistent_workers": workers > 0}


def first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) else batch


# ------------------------------------------------------------------ the measurement


def cases(small: bool) -> dict[str, Any]:
    """By format: how to write it, its samples, its decoding and its readers."""
    scale = 1 if small else 8
    tar: dict[str, Any] = {
        "paceline": paceline_shards,
        "torch DataLoader": partial(torch_files, read_tar),
    }
    if works("webdataset"):
        tar["WebDataset"] = webdataset_tar
    if works("streaming"):
        tar["StreamingDataset"] = streaming_tar
    lines = {"paceline": paceline_shards, "torch DataLoader": partial(torch_files, read_jsonl)}
    tokens = {"paceline": paceline_tokens, "torch DataLoader": torch_tokens}
    return {
        "jsonl": (write_jsonl, 2048 * scale, decode_json, lines),
        "tar": (write_tar, 1024 * scale, decode_tar, tar),
        "tokens": (write_tokens, 2048 * scale, None, tokens),
    }


def works(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError as error:
        print(f"left out: {package} ({error})")
        return False
    return True


def cpu_seconds() -> float:
    """Processor time of this process and its loader workers: on a busy machine the fairer clock."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # not Linux, or just gone
            on_cpu = Path(f"/proc/{child.pid}/schedstat").read_text().split()[0]
            total += int(on_cpu) / 1e9
    return total


def measure(readers: dict[str, Epochs], rounds: int) -> dict[str, tuple[float, float]]:
    """Samples a second of each, and a processor's second: medians of rounds taken in turns."""
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, epoch in readers.items():
            start, cpu = time.perf_counter(), cpu_seconds()
            samples = sum(epoch())
            took, busy = time.perf_counter() - start, cpu_seconds() - cpu
            if turn:  # the first starts workers and fills the page cache
                speeds[name].append((samples / took, samples / busy))
    return {
        name: (statistics.median(wall), statistics.median(cpu))
        for name, (wall, cpu) in ((n, zip(*found, strict=True)) for n, found in speeds.items())
    }


def waited(epoch: Epochs) -> float:
    """The part of the time that a loop with steps of 20 ms waits for data."""
    batches = epoch()
    next(batches)
    waiting, start = 0.0, time.perf_counter()
    for _ in range(25):
        time.sleep(STEP_S)
        asked = time.perf_counter()
        if next(batches, None) is None:
            break
        waiting += time.perf_counter() - asked
    share = waiting / (time.perf_counter() - start)
    batches.close()  # type: ignore[attr-defined]
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "tar", "tokens"])
    parser.add_argument("--small", action="store_true", help="an eighth of the samples")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    for kind, (write, samples, decode, readers) in cases(options.small).items():
        if kind not in options.formats:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), samples)
            files = sorted(str(file) for file in Path(folder).iterdir())
            for workers in options.workers:
                made = {name: make(files, decode, workers) for name, make in readers.items()}
                found = measure(made, options.rounds)
                share = waited(made["paceline"])
                unit = CONTEXT if kind == "tokens" else 1
                ours = found["paceline"]
                for name, (speed, per_cpu) in found.items():
                    times, cpu_times = ours[0] / speed, ours[1] / per_cpu
                    row = {"format": kind, "workers": workers, "reader": name}
                    speeds = {"samples_per_s": round(speed), "per_cpu_s": round(per_cpu)}
                    results.append({**row, **speeds, "ours_is": times, "ours_is_cpu": cpu_times})
                    rate = f"{speed * unit:12,.0f} {'tokens' if unit > 1 else 'samples'}/s"
                    print(
                        f"{kind:7} workers={workers} {name:18} {rate}, ours is {times:.2f}x "
                        f"(by processor time {cpu_times:.2f}x)"
                    )
                print(f"{kind:7} workers={workers} waiting for data in steps of 20 ms: {share:.1%}")
                made.clear()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
