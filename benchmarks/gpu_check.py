"""What has to hold on a GPU, checked on one: prints a table, exits with 1 if anything fails.

    python benchmarks/gpu_check.py [PART OF A NAME ...]

Two ranks share the GPU over Gloo, because NCCL refuses two ranks on one device; NCCL itself is
checked in a world of one, and where it matters between two ranks that pass for different hosts.
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
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.models import GPT, token_cross_entropy


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


def compressed(form: str, ranks: int, layout: str, tolerance: float, *, inline: bool) -> str:
    """The same on GPU and CPU; ``inline``: on a stream beside the backward, as with NCCL."""
    options = {"compress": paceline.Compression(form, warmup_steps=0), "layout": layout}
    on_cpu = several("cpu", "fp64", ranks, **options)
    return close(several("cuda", "fp64", ranks, inline, **options), on_cpu, tolerance)


def local_steps(tolerance: float, **options: Any) -> str:
    """Replicas that train alone do on a GPU what they do on a CPU."""
    chosen = {"local_steps": paceline.LocalSteps(**options)}
    on_cpu = several("cpu", "fp64", **chosen)
    return close(several("cuda", "fp64", **chosen), on_cpu, tolerance)


def several(
    device: str, precision: str, size: int = 2, inline: bool = False, **options: Any
) -> list[float]:
    """The losses of ``size`` ranks that share the GPU, or are on the CPU."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = _free_port()
    ranks = [
        context.Process(
            target=_rank, args=(rank, size, port, device, precision, inline, options, queue)
        )
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    losses = [queue.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    failed = [found for found in losses if isinstance(found, str)]
    assert not failed, failed[0]
    assert all(found == losses[0] for found in losses)
    return losses[0]


def _rank(
    rank: int,
    size: int,
    port: int,
    device: str,
    precision: str,
    inline: bool,
    options: dict[str, Any],
    queue: Any,
) -> None:
    os.environ.update(_environment(rank, size, port))
    place = "cuda:0" if device == "cuda" else "cpu"
    try:
        if inline:
            from paceline.sync import averaging

            averaging._by_nccl = lambda world: True
        with paceline.World.init(backend="gloo", device=place):
            queue.put(train(device, precision, microbatch=2, **options))
    except Exception:
        queue.put(traceback.format_exc())


def without_gradients(precision: str, layout: str) -> str:
    """Two NCCL ranks of which one trains nothing: both must meet on the GPU all the same."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = _free_port()
    ranks = [
        context.Process(target=_half_frozen, args=(rank, port, precision, layout, queue))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    stuck = [number for number, rank in enumerate(ranks) if rank.is_alive()]
    for number in stuck:
        ranks[number].terminate()
    assert not stuck, f"ranks {stuck} hang"
    norms = [queue.get() for _ in ranks]
    assert norms[0] == norms[1] > 0, norms
    return f"norm {norms[0]:.3f} on both ranks"


def _half_frozen(rank: int, port: int, precision: str, layout: str, queue: Any) -> None:
    """The first half of the model is frozen: with pp=2 that is all that rank 0 holds."""
    os.environ.update(_environment(rank, 2, port))
    # To NCCL they are two hosts, or it would refuse them one GPU.
    os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    with paceline.World.init(device="cuda:0"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        model[:2].requires_grad_(False)
        engine = paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            layout=layout,
            precision=precision,
            clip_norm=1.0,
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 16, generator=generator)
            result = engine.step((x, torch.randint(0, 16, (4,), generator=generator)))
        queue.put(result.grad_norm)


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
    "two ranks on one GPU over Gloo, fp64": lambda: two_ranks("fp64", 1e-10),
    "two ranks on one GPU over Gloo, bf16": lambda: two_ranks("bf16", 2e-2),
    # Both add up in another order: a rounding that falls the other way shows in the last digits.
    **{
        f"{form}, {layout}{', on a stream' if inline else ''}, against the CPU": functools.partial(
            compressed, form, ranks, layout, 1e-6, inline=inline
        )
        for form, ranks, layout, inline in (
            ("fp16", 2, "dp=2", False),
            ("int8", 2, "dp=2", False),
            ("int8", 3, "dp=3", False),
            ("sign", 3, "dp=3", False),
            ("topk:0.1", 2, "dp=2", False),
            ("topk:0.1", 2, "dp=2", True),
            ("randomk:0.1", 2, "dp=2", True),
            ("powersgd:2+bf16", 2, "dp=2", True),
            ("int8", 2, "dp=2,zero=2", False),
        )
    },
    "a rank without gradients, NCCL": lambda: without_gradients("fp32", "pp=2"),
    "a rank without gradients, NCCL, fp16": lambda: without_gradients("fp16", "pp=2"),
    "a rank without gradients, NCCL, zero": lambda: without_gradients("fp16", "dp=2,zero=3"),
    "NaN is named": nan_is_named,
    "the loader pins memory": loader_pins_memory,
    "random state": random_state_round_trip,
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
