"""What has to hold on a GPU, checked on one: prints a table, exits with 1 if anything fails.

    python benchmarks/gpu_check.py [PART OF A NAME ...]

Where there are several ranks, they share the GPU over real NCCL (``share_gpu``). Every layout is
checked in the same way by nccl_matrix.py; here are the things that need no second layout.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.models import GPT, token_cross_entropy
from paceline.testing import RankPool


def train(device: str, precision: str = "fp32", steps: int = 5, **options: Any) -> list[float]:
    """Losses of a small GPT trained on this rank's share of fixed batches."""
    world = paceline.World.current()
    torch.manual_seed(0)
    model = GPT(vocab_size=64, context=32, layers=2, heads=2, width=64)
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        precision=precision,
        clip_norm=1.0,
        **options,
    )
    assert engine.device.type == device, engine.device
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (8 if step < steps - 1 else 5, 33), generator=generator)
        tokens[:, 20:][torch.rand(len(tokens), 13, generator=generator) < 0.5] = 0
        start, stop = paceline.data.share(len(tokens), world.rank, world.size)
        share = tokens[start:stop]
        targets = share[:, 1:].masked_fill(share[:, 1:] == 0, -100)
        losses.append(engine.step((share[:, :-1], targets)).loss)
    return losses


def close(got: list[float], expected: list[float], tolerance: float) -> str:
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
    assert worst <= tolerance, f"largest relative difference {worst:.2e} > {tolerance:.0e}"
    return f"largest relative difference {worst:.1e} (bound {tolerance:.0e})"


def reference(precision: str) -> list[float]:
    with paceline.World.init(device="cpu"):
        return train("cpu", precision)


def one_gpu(precision: str, tolerance: float, **options: Any) -> str:
    with paceline.World.init(device="cuda"):
        return close(train("cuda", precision, **options), reference_losses[precision], tolerance)


def nccl_world_of_one() -> str:
    environment = _environment(0, 1)
    os.environ.update(environment)
    try:
        with paceline.World.init() as world:
            assert world.backend == "nccl", world.backend
            on_gpu = torch.ones(3, device=world.device)
            on_cpu = torch.ones(3)
            paceline.collectives.all_reduce(on_gpu, op="mean")
            paceline.collectives.all_reduce(on_cpu)
            return close(train("cuda"), reference_losses["fp32"], 1e-4)
    finally:
        for name in environment:
            del os.environ[name]


def two_ranks(precision: str, tolerance: float) -> str:
    return close(several("cuda", precision), reference_losses[precision], tolerance)


def compressed(form: str, ranks: int, layout: str, tolerance: float) -> str:
    """The same over NCCL, on a stream beside the backward, and over Gloo, by a thread."""
    options = {"compress": paceline.Compression(form, warmup_steps=0), "layout": layout}
    on_cpu = several("cpu", "fp64", ranks, **options)
    return close(several("cuda", "fp64", ranks, **options), on_cpu, tolerance)


def local_steps(tolerance: float, **options: Any) -> str:
    """Replicas that train alone do on a GPU what they do on a CPU."""
    chosen = {"local_steps": paceline.LocalSteps(**options)}
    on_cpu = several("cpu", "fp64", **chosen)
    return close(several("cuda", "fp64", **chosen), on_cpu, tolerance)


def several(device: str, precision: str, size: int = 2, **options: Any) -> list[float]:
    """The losses of ``size`` ranks on the CPU, or that share the GPU over NCCL."""
    losses = pool().run(
        functools.partial(train, device, precision, microbatch=2, **options),
        world_size=size,
        device=device,
        share_gpu=device == "cuda",
        timeout=120,
    )
    assert all(found == losses[0] for found in losses)
    return losses[0]


@functools.cache
def pool() -> RankPool:
    """Live ranks for all checks."""
    return RankPool(preload=["paceline.models.gpt"])


def nan_is_named() -> str:
    with paceline.World.init(device="cuda"):
        model = nn.Linear(4, 2)
        engine = paceline.Engine(
            model, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        x = torch.randn(4, 4)
        x[2, 1] = float("nan")
        engine.step((x, torch.zeros(4, dtype=torch.long)))
        try:
            engine.settle()
        except paceline.errors.NonFiniteError as error:
            if "step 1: the loss is nan on rank 0" in str(error):
                return "raised, with step and rank"
            raise
        raise AssertionError("a NaN went unnoticed")


def loader_pins_memory() -> str:
    with paceline.World.init(device="cuda"):
        data = torch.utils.data.TensorDataset(torch.randn(10, 4))
        with paceline.loader(data, global_batch=4) as batches:
            pinned = [batch[0].is_pinned() for batch in batches]
    assert pinned == [True] * 3, pinned
    return "3 of 3 batches in pinned memory"


def random_state_round_trip() -> str:
    from paceline.world import rng_state, set_rng_state

    with paceline.World.init(device="cuda") as world:
        world.seed(1)
        state = rng_state()
        first = torch.randn(5, device="cuda")
        set_rng_state(state)
        assert torch.equal(first, torch.randn(5, device="cuda"))
    return "the CUDA stream comes back bitwise-identical"


def kernels_draw_what_torch_draws() -> str:
    """The numbers of ``randomness: layout-free`` and dropout by them, to the bit."""
    from paceline.randomness.counter import Numbers

    draw = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**31), 2**31, (2, 5), generator=draw).to(torch.int32)
    on_cpu = Numbers(*keys, torch.arange(250_001, dtype=torch.int32))
    on_gpu = Numbers(*keys.cuda(), on_cpu.positions.cuda())
    assert torch.equal(on_gpu.words().cpu(), on_cpu.words())
    keep = on_cpu.keep(0.1).cuda()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        given = torch.randn(keep.shape, device="cuda").to(dtype)
        found = on_gpu.dropped(given, 0.1, 1 / 0.9)
        assert found is not None, f"no kernel for {dtype}"
        assert torch.equal(found, (given * keep).mul_(1 / 0.9)), dtype
    return "the same words on CPU and GPU, the same dropout in three precisions"


CHECKS: dict[str, Callable[[], str]] = {
    "local steps, averaged": lambda: local_steps(1e-10, every=2, method="average"),
    "local steps, diloco in fragments beside steps": lambda: local_steps(
        1e-10, every=2, fragments=2, overlap=1
    ),
    "local steps, in int8": lambda: local_steps(1e-6, every=2, overlap=1, exchange="int8"),
    # TF32 is off by default: fp32 differs by the order of sums only.
    "fp32 on the GPU against the CPU": lambda: one_gpu("fp32", 1e-4),
    "fp64 on the GPU against the CPU": lambda: one_gpu("fp64", 1e-10),
    "bf16": lambda: one_gpu("bf16", 2e-2),
    "fp16 with a scaler": lambda: one_gpu("fp16", 2e-2),
    "compiled": lambda: one_gpu("fp32", 1e-3, compile=True),
    "accumulation": lambda: one_gpu("fp64", 1e-10, microbatch=3),
    "NCCL, world of one": nccl_world_of_one,
    "two ranks on one GPU, fp64": lambda: two_ranks("fp64", 1e-10),
    "two ranks on one GPU, bf16": lambda: two_ranks("bf16", 2e-2),
    # Both add up in another order: a rounding that falls the other way shows in the last digits.
    **{
        f"{form}, {layout}, against the CPU": functools.partial(
            compressed, form, ranks, layout, 1e-6
        )
        for form, ranks, layout in (
            ("fp16", 2, "dp=2"),
            ("int8", 2, "dp=2"),
            ("int8", 3, "dp=3"),
            ("sign", 3, "dp=3"),
            ("topk:0.1", 2, "dp=2"),
            ("randomk:0.1", 2, "dp=2"),
            ("powersgd:2+bf16", 2, "dp=2"),
            ("int8", 2, "dp=2,zero=2"),
        )
    },
    "NaN is named": nan_is_named,
    "the loader pins memory": loader_pins_memory,
    "random state": random_state_round_trip,
    "random numbers by kernel": kernels_draw_what_torch_draws,
}


def _environment(rank: int, size: int, port: int | None = None) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port()),
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no GPU here: this check needs one.")
    reference_losses = {name: reference(name) for name in ("fp32", "fp64", "bf16", "fp16")}
    failed = 0
    wanted = {
        title: check
        for title, check in CHECKS.items()
        if len(sys.argv) == 1 or any(part in title for part in sys.argv[1:])
    }
    for title, check in wanted.items():
        try:
            print(f"ok    {title}: {check()}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {title}:\n{traceback.format_exc()}", flush=True)
    print(f"{len(wanted) - failed} passed, {failed} failed")
    sys.exit(failed > 0)
