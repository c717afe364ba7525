"""Layouts over real NCCL, several ranks on one GPU: prints a table, exits with 1 if any differs.

    python benchmarks/nccl_check.py [PART OF A NAME ...]

NCCL refuses two ranks of one host on one device. A distinct ``NCCL_HOSTID`` for each process lets
them pass for different hosts: slow, over sockets, but with NCCL's own streams, order and errors.
Every rank builds its model from another seed: all layouts must train rank 0's, as one process
does. Compared are the losses of four steps in float64, and a checksum of the parameters. A case
that hangs is ended after a minute, with the stack of every rank.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.models import GPT, token_cross_entropy

LIMIT_SECONDS = 60
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A layout, its ranks, and what is unusual about the model or the batch."""

    layout: str
    ranks: int
    model: str = "gpt"
    samples: int = 8
    precision: str = "fp64"
    tolerance: float = 1e-9
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What the case is called in the table."""
        unusual = [] if self.model == "gpt" else [self.model]
        unusual += [] if self.samples == 8 else [f"{self.samples} samples"]
        unusual += [] if self.precision == "fp64" else [self.precision]
        unusual += [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([self.layout, *unusual])


class Partly(nn.Module):
    """A model whose first half is frozen, so that a stage or a shard may have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.head = nn.Linear(32, 4)
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def build(kind: str) -> tuple[nn.Module, Any]:
    """The model of a case and its loss."""
    if kind == "gpt":
        return GPT(vocab_size=64, context=16, layers=4, heads=4, width=32), token_cross_entropy
    return Partly(), F.cross_entropy


def batches(case: Case) -> list[Any]:
    """The global batches of a run."""
    generator = torch.Generator().manual_seed(0)
    if case.model == "gpt":
        tokens = [
            torch.randint(0, 64, (case.samples, 17), generator=generator) for _ in range(STEPS)
        ]
        return [(t[:, :-1], t[:, 1:]) for t in tokens]
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    return [
        (
            torch.randn(case.samples, 32, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 4, (case.samples,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def train(case: Case, rank: int, layout: str) -> tuple[list[float], float]:
    """Losses, and the sum of the absolute values of all parameters at the end."""
    torch.manual_seed(rank)
    model, loss = build(case.model)
    options: dict[str, Any] = {"microbatch": 2, "clip_norm": 1.0, **case.options}
    engine = paceline.Engine(
        model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        layout=layout,
        precision=case.precision,
        **options,
    )
    place = paceline.Layout.parse(layout).coordinate(engine.world.rank)
    shares = paceline.Layout.parse(layout).dp
    losses = []
    for inputs, targets in batches(case):
        start, stop = paceline.data.share(len(inputs), place.dp, shares)
        losses.append(engine.step((inputs[start:stop], targets[start:stop])).loss)
    state = engine.state_dict()["model"]
    return losses, sum(float(value.double().abs().sum()) for value in state.values())


def _rank(case: Case, rank: int, port: int, queue: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(case.ranks),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(case.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
    )  # fmt: skip
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 5, exit=True)
    try:
        with paceline.World.init(backend="nccl", device="cuda:0", timeout=LIMIT_SECONDS):
            queue.put((rank, train(case, rank, case.layout)))
    except Exception:
        queue.put((rank, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()


def run(case: Case) -> str:
    """The largest difference from one process on the CPU; raises where a rank failed or hung."""
    one = Case("dp=1", 1, case.model, case.samples, case.precision, options=case.options)
    with paceline.World.init(device="cpu"):
        expected = train(one, 0, "dp=1")
    context = mp.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ranks = [
        context.Process(target=_rank, args=(case, rank, port, queue)) for rank in range(case.ranks)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in ranks:
            rank, result = queue.get(timeout=LIMIT_SECONDS)
            assert not isinstance(result, str), f"rank {rank}: {result}"
            found[rank] = result
    finally:
        for process in ranks:
            process.join(timeout=10 if len(found) == len(ranks) else 1)
            if process.is_alive():
                process.kill()
                process.join()
    worst = 0.0
    for losses, checksum in found.values():
        pairs = zip([*losses, checksum], [*expected[0], expected[1]], strict=True)
        worst = max(worst, *(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs))
    assert worst <= case.tolerance, f"differs by {worst:.1e} (bound {case.tolerance:.0e})"
    return f"{worst:.1e}"


CASES = [
    Case("dp=2", 2),
    Case("dp=3", 3),
    Case("dp=2,zero=1", 2),
    Case("dp=2,zero=2", 2),
    Case("dp=4,zero=3", 4),
    Case("dp=4,zero=3,replicas=2", 4),
    Case("tp=2", 2),
    Case("tp=4", 4),
    Case("dp=2,tp=2", 4),
    Case("pp=2", 2),
    Case("pp=4", 4),
    Case("dp=2,pp=2", 4),
    Case("dp=2,zero=2,pp=2", 4),
    Case("tp=2,pp=2", 4),
    Case("dp=2,zero=3,tp=2", 4),
    # Ranks that see no sample, or hold no parameter that has a gradient.
    Case("dp=4", 4, samples=3),
    Case("dp=4,zero=3", 4, samples=3),
    Case("dp=2,zero=3", 2, model="partly frozen"),
    Case("pp=2", 2, model="partly frozen"),
    Case("dp=2,pp=2", 4, model="partly frozen"),
    Case("dp=2,zero=1,pp=2", 4, model="partly frozen"),
    Case("pp=2", 2, model="partly frozen", precision="fp16", tolerance=5e-2),
    Case("dp=2,zero=3", 2, model="partly frozen", precision="fp16", tolerance=5e-2),
]


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", help="parts of the titles of the cases to run")
    wanted = parser.parse_args().part
    if not torch.cuda.is_available():
        sys.exit("no GPU here: this check needs one.")
    failed = 0
    chosen = [case for case in CASES if not wanted or any(part in case.title for part in wanted)]
    for case in chosen:
        try:
            print(f"ok    {case.title}: {run(case)}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {case.title}: {type(error).__name__} {error}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
