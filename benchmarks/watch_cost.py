"""What the watch for hangs costs: a small GPT on two CPU ranks, with it and without.

The watch thread is switched on and off in turns within one run, so that whatever else the machine
does hits both; its own processor time is read as well. torch's flight recorder cannot be switched
within a run: what it adds to a collective is taken from the processor time of many small
all-reduces in runs with and without it.

    python benchmarks/watch_cost.py
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.diagnose.hangs import flight_recorder
from paceline.launch import local
from paceline.launch.environment import FLIGHT_RECORDER, read_environment
from paceline.models import GPT, token_cross_entropy
from paceline.world import World, joining

RESULTS = Path(__file__).parent / "results" / "watch_cost.json"


def train_in_turns(turns: int, steps: int, after: float) -> dict[str, float]:
    """On each rank: step times with the watch against those without, and the watch's own time."""
    world = World.init(hang_after=after)
    assert world._watch is not None
    world._watch.stop()
    place = read_environment()
    assert place is not None
    step = _step_of_small_gpt(world)
    before = sum(place.begun for place in flight_recorder.group_progress())
    _turn(step, steps)
    collectives = (sum(place.begun for place in flight_recorder.group_progress()) - before) / steps
    ratios, plain, busy, watched_for = [], [], 0.0, 0.0
    for number in range(turns):
        seconds = {}
        # Whoever came first in every pair would profit from a drift of the machine.
        for watched in (True, False) if number % 2 else (False, True):
            watch = joining.start_watch(place, world.pulse, after) if watched else None
            seconds[watched] = _turn(step, steps)
            if watch is not None:
                busy += _thread_seconds(watch._thread.native_id)
                watched_for += seconds[watched] * steps
                watch.stop()
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False])
    return {
        "step": statistics.median(plain),
        "ratio": statistics.median(ratios),
        "busy": busy / watched_for,
        "collectives": collectives,
    }


def _step_of_small_gpt(world: World) -> Any:
    torch.manual_seed(0)
    model = GPT(vocab_size=256, context=128, layers=4, heads=4, width=128)
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
        layout=f"dp={world.size}",
    )
    tokens = torch.randint(0, 256, (8, 129))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return functools.partial(engine.step, batch)


def _turn(step: Any, steps: int) -> float:
    """Seconds a step takes, over a few."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def _thread_seconds(thread: int | None) -> float:
    """Processor time of a thread of this process."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def small_all_reduces(count: int) -> float:
    """Processor seconds of this thread for one small all-reduce."""
    World.init(hang_after=0)
    tensor = torch.ones(16)
    for _ in range(count // 10):
        dist.all_reduce(tensor)
    began = time.thread_time()
    for _ in range(count):
        dist.all_reduce(tensor)
    return (time.thread_time() - began) / count


def recorder_cost(pairs: int, count: int) -> float:
    """Seconds that the recorder adds to a collective."""
    differences = []
    for _ in range(pairs):
        seconds = {}
        for size in ("256", "0"):
            seconds[size] = local.call(
                functools.partial(small_all_reduces, count),
                nproc=2,
                env={FLIGHT_RECORDER: size, "OMP_NUM_THREADS": "1"},
            )
        differences.append(seconds["256"] - seconds["0"])
    return statistics.median(differences)


def main() -> None:
    """Print the figures and write them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=16, help="pairs of turns")
    parser.add_argument("--steps", type=int, default=40, help="steps a turn")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs for the recorder")
    parser.add_argument("--after", type=float, default=60.0, help="hangs.after")
    options = parser.parse_args()
    run = functools.partial(train_in_turns, options.turns, options.steps, options.after)
    result = local.call(run, nproc=2, env={"OMP_NUM_THREADS": "1"})
    recorder = recorder_cost(options.pairs, 5000)
    share = recorder * result["collectives"] / result["step"]
    print(f"step without the watch           {1e3 * result['step']:8.1f} ms")
    print(f"step with it, median of ratios   {result['ratio']:8.4f}")
    print(f"processor time of the watch      {100 * result['busy']:8.3f} % of the step's time")
    print(
        f"the recorder                     {100 * share:8.3f} % ({1e6 * recorder:.1f} µs for each "
        f"of {result['collectives']:.0f} collectives a step)"
    )
    figures = {**result, "recorder_seconds": recorder, "recorder_share": share}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
