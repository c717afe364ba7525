"""What random numbers that do not know the layout cost: a step of a GPT with each kind.

The same model is trained with ``randomness`` fast and layout-free, with dropout 0.1 and without.
Both take turns, a few steps each, so that whatever else the machine does hits both. On a CPU the
time is that of the processor, summed over threads; on a GPU that of the clock.

    python benchmarks/randomness.py                            # a small GPT on the CPU
    python benchmarks/randomness.py --device cuda --compile    # and --width 768 --layers 12 …
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import paceline
from paceline.models import GPT, token_cross_entropy

RESULTS = Path(__file__).parent / "results"
KINDS = ("fast", "layout-free")


def stepper(options: argparse.Namespace, kind: str, rate: float) -> Callable[[int], float]:
    """A function that trains some steps and gives the seconds that each took."""
    torch.manual_seed(0)
    model = GPT(
        vocab_size=options.vocab,
        context=options.context,
        layers=options.layers,
        heads=options.heads,
        width=options.width,
        dropout=rate,
    )
    on_gpu = options.device == "cuda"
    engine = paceline.Engine(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, fused=on_gpu),
        loss=token_cross_entropy,
        precision=options.precision,
        compile=options.compile,
        randomness=kind,  # type: ignore[arg-type]
    )
    text = torch.randint(0, options.vocab, (options.batch, options.context + 1))
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def run(steps: int) -> float:
        started = now()
        for _ in range(steps):
            engine.step(batch)
        return (now() - started) / steps

    return run


def compare(options: argparse.Namespace, rate: float) -> dict[str, float]:
    """Milliseconds of a step by kind, and the median ratio of the turns."""
    runs = {kind: stepper(options, kind, rate) for kind in KINDS}
    for run in runs.values():
        run(2)
    turns = [{kind: run(options.steps) for kind, run in runs.items()} for _ in range(options.turns)]
    ratio = statistics.median(turn["layout-free"] / turn["fast"] for turn in turns)
    milliseconds = {kind: 1e3 * statistics.median(turn[kind] for turn in turns) for kind in KINDS}
    return {"dropout": rate, **milliseconds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    for name, default in (
        *(("vocab", 256), ("context", 128), ("layers", 4), ("heads", 4), ("width", 128)),
        *(("batch", 16), ("steps", 3), ("turns", 7)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    paceline.World.init(device=options.device)
    rows = [compare(options, rate) for rate in (0.0, 0.1)]
    print(f"{'dropout':>8} {'fast':>10} {'layout-free':>12} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['dropout']:>8} {row['fast']:>8.1f}ms {row['layout-free']:>10.1f}ms "
            f"{row['ratio']:>7.3f}"
        )
    RESULTS.mkdir(exist_ok=True)
    kind = f"{options.device}{'-compiled' if options.compile else ''}"
    written = {"options": vars(options), "rows": rows}
    (RESULTS / f"randomness-{kind}.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
