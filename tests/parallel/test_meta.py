"""Models built on the meta device get the same values on every layout, a block at a time."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import paceline
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.parallel.meta import is_on_meta, materialise
from paceline.parallel.shard import Sharding, shard
from paceline.testing import assert_same
from parallel import shard_cases
from parallel.shard_cases import Loss


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return shard_cases.MODELS[name]()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in held.items()}


def values(name: str) -> dict[str, torch.Tensor]:
    model = on_meta(name)
    assert is_on_meta(model)
    materialise(model, seed=3, device="cpu")
    assert not is_on_meta(model)
    return {k: v.detach() for k, v in state_of(model).items()}


def test_huggingface_models_get_what_their_own_constructor_would_draw() -> None:
    made, built = on_meta("hf-gpt2"), shard_cases.build("hf-gpt2", torch.float32)
    materialise(made, seed=0, device="cpu")
    for (name, got), wanted in zip(made.named_parameters(), built.parameters(), strict=True):
        assert abs(got.std() - wanted.std()) <= 0.4 * wanted.std(), name
    llama = on_meta("hf-llama")
    materialise(llama, seed=0, device="cpu")
    assert_same(
        dict(llama.named_buffers()),
        dict(shard_cases.build("hf-llama", torch.float32).named_buffers()),
    )


def test_values_follow_from_seed_and_name_alone() -> None:
    before = torch.get_rng_state()
    first, again = values("gpt"), values("gpt")
    assert_same(first, again)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])
    other = on_meta("gpt")
    materialise(other, seed=4, device="cpu")
    assert not torch.equal(first["positions.weight"], other.positions.weight)


def test_tied_parameters_stay_tied_and_the_same_objects() -> None:
    model = on_meta("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    materialise(model, seed=0, device="cpu")
    assert model.head.weight is model.tokens.weight
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


def test_an_initialiser_of_the_users_own_comes_first() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)
            nn.init.constant_(module.bias, 1.0)

    model = on_meta("mlp")
    materialise(model, seed=0, device="cpu", init=init)
    assert bool((model[1].weight == 2.0).all())
    assert bool((model[1].bias == 1.0).all())
    assert float(model[0].weight.detach().std()) > 0.5  # the embedding's own


class Table(nn.Module):
    """Its values come from the constructor alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scale = nn.Linear(2, 2)
        if kind == "parameter":
            self.own = nn.Parameter(torch.ones(3))
        else:
            table = {
                "float": torch.ones(3),
                "integer": torch.arange(3),
                "bool": torch.ones(3, dtype=torch.bool),
            }
            self.register_buffer("own", table[kind])


@pytest.mark.parametrize("kind", ["parameter", "float", "integer", "bool"])
def test_what_only_a_constructor_computes_is_refused_by_name(kind: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"part": Table(kind)})
    with pytest.raises(TrainingError, match=r"part\.own \(in a Table\)"):
        materialise(model, seed=0, device="cpu")

    def init(module: nn.Module) -> None:
        if isinstance(module, Table):
            module.own.fill_(1)

    materialise(model, seed=0, device="cpu", init=init)
    assert bool((model["part"].own == 1).all())


def spread_and_materialise(name: str, layout: str) -> dict[str, torch.Tensor]:
    world = paceline.World.current()
    placed = Layout.parse(layout)
    model = on_meta(name)
    mesh = world.mesh(placed)
    if placed.tp > 1:
        cut_for_tensor_parallel(model, mesh["tp"])
    if placed.zero:
        shard(Loss(model), mesh, stage=placed.zero, sharding=Sharding(), model=model)
    materialise(model, seed=3, device="cpu")
    return state_of(model)


def cut_for_tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """Every other matrix by its last dimension, the others by their first; the rest whole."""
    spread: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in spread:
                placement = Shard(len(spread) % 2) if parameter.ndim == 2 else Replicate()
                cut = distribute_tensor(parameter, mesh, [placement])
                spread[id(parameter)] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            setattr(module, name, spread[id(parameter)])


def spread_all(cases: list[tuple[str, str]]) -> list[Any]:
    return [spread_and_materialise(*case) for case in cases]


@pytest.mark.world(3, 4)
def test_every_layout_gets_the_values_of_one_process(ranks: Any) -> None:
    cases = [
        ("gpt", "dp=3,zero=3"),
        ("lstm", "dp=3,zero=2"),
        ("shared", "dp=3,zero=1"),
        ("mlp", "dp=3"),
    ]
    if ranks.world_size == 4:
        cases = [("gpt", "dp=2,tp=2,zero=3"), ("mlp", "tp=4"), ("shared", "dp=4,replicas=2,zero=1")]
    expected = {name: values(name) for name, _ in cases}
    for results in ranks(spread_all, cases):
        for (name, _), state in zip(cases, results, strict=True):
            assert_same({k: v.detach() for k, v in state.items()}, expected[name])


BLOCKS, WIDTH = 48, 1024
_M_MMAP_THRESHOLD = -3  # glibc's <malloc.h>


class Large(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def peak_of(work: Callable[[], Any]) -> float:
    """By how many MiB the memory of this process grew at most during ``work``."""

    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def start_a_large_model() -> tuple[float, float]:
    # Let the allocator give back each large piece when it is freed: how much it would keep for
    # later differs between machines (a fourth of the model on x86 with torch 2.11).
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    mesh = paceline.World.current().mesh(Layout.parse("dp=2,zero=3"))
    with torch.device("meta"):
        small, model = Large(2), Large(BLOCKS)

    def start(model: nn.Module) -> None:
        shard(model, mesh, stage=3, sharding=Sharding())
        materialise(model, seed=0, device="cpu")
        with torch.no_grad():
            assert bool(model(torch.ones(1, WIDTH)).isfinite().all())

    start(small)  # what torch itself needs, once
    return peak_of(lambda: start(model)), peak_of(lambda: Large(BLOCKS))


@pytest.mark.world(2)
def test_a_process_never_holds_more_than_its_pieces_and_a_block(ranks: Any) -> None:
    size = BLOCKS * WIDTH * (WIDTH + 1) * 4 / 2**20
    for cut, whole in ranks(start_a_large_model):
        assert whole >= 0.95 * size  # the measure sees what is there
        assert cut <= 0.75 * size  # half of it, a few blocks, and what the allocator keeps
