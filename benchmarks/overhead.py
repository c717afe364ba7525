"""What Paceline costs on top of a hand-written loop: the same model, data and optimizer, one run.

On CPU, two ranks train the same GPT by five loops: hand-written DDP, Paceline's Engine, Paceline's
Trainer, Accelerate and Lightning Fabric. The loops take turns, a few steps each, so that whatever
else the machine does hits all of them; the table gives each loop's median ratio to the
hand-written one over all turns.

    python benchmarks/overhead.py                 # two CPU ranks; pip install 'paceline[bench]'
    python benchmarks/overhead.py --device cuda   # one GPU: plain compiled loop against Engine
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.models import GPT, token_cross_entropy

RESULTS = Path(__file__).parent / "results"
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Loop = Callable[[int], float]
"""Runs some steps and gives the seconds they took."""


def make_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(
        vocab_size=options.vocab,
        context=options.context,
        layers=options.layers,
        heads=options.heads,
        width=options.width,
    )


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total, count = token_cross_entropy(logits, targets)
    return total / count


def optimizer_for(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")


def batches_for(options: argparse.Namespace, rank: int) -> Batches:
    generator = torch.Generator().manual_seed(rank)
    result = []
    for _ in range(8):
        shape = (options.batch, options.context + 1)
        tokens = torch.randint(0, options.vocab, shape, generator=generator)
        result.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return result


def timed(step: Callable[[Any], None], batches: Batches, finish: Callable[[], None]) -> Loop:
    """A loop over ``batches`` that goes on where it stopped."""

    def forever() -> Iterator[Any]:
        while True:
            yield from batches

    stream = forever()

    def run(steps: int) -> float:
        finish()
        started = time.perf_counter()
        for _ in range(steps):
            step(next(stream))
        finish()
        return time.perf_counter() - started

    return run


# ---------------------------------------------------------------------------- the loops


def hand_written(options: argparse.Namespace, rank: int) -> Callable[[Any], None]:
    from torch.nn.parallel import DistributedDataParallel

    model = make_model(options)
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_for(model, torch.device("cpu"))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = mean_loss(wrapped(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def paceline_engine(options: argparse.Namespace, rank: int) -> Callable[[Any], None]:
    model = make_model(options)
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=optimizer_for(model, torch.device("cpu")),
        clip_norm=1.0,
    )

    def step(batch: Any) -> None:
        _ = engine.step(batch).loss

    return step


def accelerate(options: argparse.Namespace, rank: int) -> Callable[[Any], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model(options)
    optimizer = optimizer_for(model, torch.device("cpu"))
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = mean_loss(model(batch[0]), batch[1])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def fabric(options: argparse.Namespace, rank: int) -> Callable[[Any], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    model = make_model(options)
    model, optimizer = fabric.setup(model, optimizer_for(model, torch.device("cpu")))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = mean_loss(model(batch[0]), batch[1])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        loss.item()

    return step


class TakeTurns(paceline.Callback):
    """Lets the other loops run between the Trainer's own steps, and times these."""

    def __init__(self, others: dict[str, Loop], steps: int, barrier: Callable[[], None]) -> None:
        self.others, self.steps, self.barrier = others, steps, barrier
        self.seconds: dict[str, list[float]] = {name: [] for name in (*others, "trainer")}

    def on_fit_start(self, trainer: paceline.Trainer) -> None:
        for loop in self.others.values():
            loop(2)  # warm up
        self._begin()

    def on_step_end(self, trainer: paceline.Trainer, result: Any) -> None:
        if trainer.step % self.steps:
            return
        self.barrier()
        self.seconds["trainer"].append(time.perf_counter() - self.started)
        for name, loop in self.others.items():
            self.seconds[name].append(loop(self.steps))
        self._begin()

    def _begin(self) -> None:
        self.barrier()
        self.started = time.perf_counter()


class Windows(torch.utils.data.Dataset):
    """The same batches, as a dataset for the Trainer."""

    def __init__(self, batches: Batches) -> None:
        self.inputs = torch.cat([x for x, _ in batches])
        self.targets = torch.cat([y for _, y in batches])

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def on_each_cpu_rank(options: argparse.Namespace) -> dict[str, list[float]]:
    world = paceline.World.init()
    # Accelerate and Fabric would otherwise set it to what they like.
    torch.set_num_threads(1)
    batches = batches_for(options, world.rank)
    makers = {
        "hand-written DDP": hand_written,
        "engine": paceline_engine,
        "accelerate": accelerate,
        "fabric": fabric,
    }
    barrier = paceline.collectives.barrier
    others = {
        name: timed(make(options, world.rank), batches, barrier) for name, make in makers.items()
    }
    turns = TakeTurns(others, options.steps, barrier)
    model = make_model(options)
    trainer = paceline.Trainer(
        model,
        loss=token_cross_entropy,
        optimizer=optimizer_for(model, torch.device("cpu")),
        global_batch=options.batch * world.size,
        clip_norm=1.0,
        callbacks=[turns],
        run_dir=options.run_dir,
        progress=False,
        checkpoint=paceline.Checkpointing(save_at_end=False),
    )
    dataset = Windows(batches_for(options, 0))  # every rank holds all of it
    trainer.fit(dataset, steps=options.steps * (options.rounds + 1))
    return turns.seconds


def cpu(options: argparse.Namespace) -> dict[str, list[float]]:
    import tempfile

    from paceline.launch import local

    with tempfile.TemporaryDirectory() as run_dir:
        options.run_dir = run_dir
        seconds: dict[str, list[float]] = local.call(
            lambda: on_each_cpu_rank(options), nproc=2, env={"OMP_NUM_THREADS": "1"}
        )
    # The first turn of each warms caches and lays out DDP's buckets.
    return {name: values[1:] for name, values in seconds.items()}


# ---------------------------------------------------------------------------- one GPU


def gpu(options: argparse.Namespace) -> dict[str, list[float]]:
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    batches = [(x.to(device), y.to(device)) for x, y in batches_for(options, 0)]

    def plain() -> Callable[[Any], None]:
        model = make_model(options).to(device)
        model.compile()
        optimizer = optimizer_for(model, device)

        def step(batch: Any) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = mean_loss(model(batch[0]), batch[1])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    def engine(nonfinite: Any) -> Callable[[Any], None]:
        model = make_model(options).to(device)
        engine = paceline.Engine(
            model,
            loss=token_cross_entropy,
            optimizer=optimizer_for(model, device),
            clip_norm=1.0,
            precision="bf16",
            compile=True,
            nonfinite=nonfinite,
        )
        return lambda batch: engine.step(batch) and None

    steps = {
        "plain loop": plain(),
        "engine": engine("stop"),
        "engine, nonfinite=ignore": engine("ignore"),
    }
    loops = {name: timed(step, batches, torch.cuda.synchronize) for name, step in steps.items()}
    for loop in loops.values():
        loop(5)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, loop in loops.items():
            seconds[name].append(loop(options.steps))
    return seconds


def report(seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    base_name = next(name for name in seconds if name in ("hand-written DDP", "plain loop"))
    base = seconds[base_name]
    table = Table(title=f"overhead on {options.device}, {options.rounds} turns of {options.steps}")
    for column in ("loop", "ms/step (median)", f"ratio to {base_name} (median)", "quartiles"):
        table.add_column(column)
    rows = {}
    for name, values in seconds.items():
        ratios = sorted(value / b for value, b in zip(values, base, strict=True))
        low, middle, high = (
            statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        )
        milliseconds = 1000 * statistics.median(values) / options.steps
        rows[name] = {"ms": milliseconds, "ratio": middle, "quartiles": [low, high]}
        table.add_row(name, f"{milliseconds:.2f}", f"{middle:.4f}", f"{low:.4f} … {high:.4f}")
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"overhead-{options.device}.json"
    path.write_text(json.dumps({"options": vars(options), "loops": rows}, indent=2))
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--batch", type=int, help="samples per rank and step")
    options = parser.parse_args()
    small = dict(layers=4, width=192, heads=6, context=128, vocab=256, batch=8)
    gpt_124m = dict(layers=12, width=768, heads=12, context=1024, vocab=50304, batch=32)
    for name, value in (small if options.device == "cpu" else gpt_124m).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    report(cpu(options) if options.device == "cpu" else gpu(options), options)


if __name__ == "__main__":
    main()
