"""What layouts, activation checkpointing and offload cost on one GPU, with GPT-1.3B in bf16.

    python benchmarks/gpu_layouts.py speed       # plain compiled loop, Engine, Engine with zero=3
    python benchmarks/gpu_layouts.py recompute   # activation checkpointing: memory and time
    python benchmarks/gpu_layouts.py offload     # states larger than the memory that is allowed

``speed`` takes turns, so that whatever else the machine does hits all loops, and gives the median
ratio to the plain loop. Each part prints a table and writes JSON into benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline
from paceline.models import GPT, token_cross_entropy

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
Step = Callable[[Any], Any]
BILLION_1_3 = dict(layers=24, width=2048, heads=16, context=2048, vocab_size=50304)


def make_model(**sizes: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT(**sizes)


def make_batch(samples: int, context: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (samples, context + 1), generator=draw).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def plain_loop() -> Step:
    model = make_model(**BILLION_1_3)
    model.compile()
    optimizer = adamw(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total, count = token_cross_entropy(model(batch[0]), batch[1])
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def engine(**options: Any) -> Step:
    model = make_model(**BILLION_1_3)
    return paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=adamw(model),
        clip_norm=1.0,
        compile=True,
        **options,
    ).step


def timed(step: Step, batch: Any, steps: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def speed(options: argparse.Namespace) -> dict[str, Any]:
    batch = make_batch(options.batch, BILLION_1_3["context"], BILLION_1_3["vocab_size"])
    loops = {
        "plain compiled loop": plain_loop(),
        "Engine": engine(precision="bf16"),
        "Engine, zero=3": engine(precision="bf16", layout="dp=1,zero=3"),
    }
    for name, step in loops.items():
        print(f"{name}: first steps in {3 * timed(step, batch, 3):.1f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, step in loops.items():
            seconds[name].append(timed(step, batch, options.steps))
    base = seconds["plain compiled loop"]
    rows = {}
    for name, values in seconds.items():
        ratios = [value / b for value, b in zip(values, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows[name] = {
            "ms": 1000 * statistics.median(values),
            "ratio": middle,
            "quartiles": [low, high],
        }
    show(
        f"GPT-1.3B, bf16, {options.batch}×2048 tokens, {options.rounds} turns of {options.steps}",
        ("loop", "ms/step", "ratio (median)", "quartiles"),
        [
            (n, f"{r['ms']:.1f}", f"{r['ratio']:.4f}", "{:.4f} … {:.4f}".format(*r["quartiles"]))
            for n, r in rows.items()
        ],
    )
    return rows


def recompute(options: argparse.Namespace) -> dict[str, Any]:
    batch = make_batch(options.batch, BILLION_1_3["context"], BILLION_1_3["vocab_size"])
    rows = {}
    for mode in (None, "selective", 2, "full"):
        step = engine(precision="bf16", checkpoint_activations=mode)
        timed(step, batch, 3)
        torch.cuda.reset_peak_memory_stats()
        milliseconds = 1000 * statistics.median(timed(step, batch, 2) for _ in range(4))
        rows[str(mode)] = {"ms": milliseconds, "peak_gib": torch.cuda.max_memory_allocated() / GIB}
        del step
        forget()
    first = rows["None"]
    show(
        f"activation checkpointing, GPT-1.3B, bf16, {options.batch}×2048 tokens",
        ("checkpoint_activations", "ms/step", "to none", "peak GiB", "to none"),
        [
            (
                *(name, f"{row['ms']:.1f}", f"{row['ms'] / first['ms']:.3f}"),
                *(f"{row['peak_gib']:.1f}", f"{row['peak_gib'] / first['peak_gib']:.3f}"),
            )
            for name, row in rows.items()
        ],
    )
    return rows


def offload(options: argparse.Namespace) -> dict[str, Any]:
    """Train a model whose parameters, gradients and Adam state exceed what the GPU may hold."""
    sizes = dict(layers=32, width=2560, heads=20, context=1024, vocab_size=50304)
    allowed = options.allow
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(allowed * GIB / total)
    batch = make_batch(2, sizes["context"], sizes["vocab_size"])
    rows = {}
    for name, layout, sharding in (
        ("nothing", "dp=1", None),
        ("optimizer state", "dp=1,zero=3", paceline.Sharding(offload="optimizer")),
        ("parameters", "dp=1,zero=3", paceline.Sharding(offload="parameters")),
    ):
        torch.cuda.reset_peak_memory_stats()
        rows[name] = run_offloaded(sizes, layout, sharding, batch)
        forget()
    states = rows["parameters"]["states_gib"]
    show(
        f"offload: states of {states:.1f} GiB, GPU allowed {allowed} GiB",
        ("in the CPU's memory", "result", "ms/step", "peak GPU GiB", "loss, steps 1 … 4"),
        [
            (
                *(name, row["result"], f"{row['ms']:.0f}" if row["ms"] else "-"),
                *(f"{row['peak_gib']:.1f}", " ".join(f"{x:.4f}" for x in row["losses"]) or "-"),
            )
            for name, row in rows.items()
        ],
    )
    return rows


def run_offloaded(sizes: dict[str, int], layout: str, sharding: Any, batch: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(**sizes)
    parameters = sum(p.numel() for p in model.parameters())
    result, losses, milliseconds = "trains", [], 0.0
    try:
        made = paceline.Engine(
            model,
            loss=token_cross_entropy,
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True),
            layout=layout,
            precision="bf16",
            sharding=sharding,
        )
        losses += [made.step(batch).loss for _ in range(3)]
        started = time.perf_counter()
        losses.append(made.step(batch).loss)
        milliseconds = 1000 * (time.perf_counter() - started)
    except torch.OutOfMemoryError:
        result = "out of memory"
    return {
        "result": result,
        "ms": milliseconds,
        "losses": losses,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "states_gib": parameters * 16 / GIB,
    }


def forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def show(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("speed", "recompute", "offload"))
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    parser.add_argument("--allow", type=float, default=32, help="GiB of GPU memory for offload")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = {"speed": speed, "recompute": recompute, "offload": offload}[options.part](options)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu_{options.part}.json"
    path.write_text(json.dumps(rows, indent=2))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
