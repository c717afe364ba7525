"""Ranks that build different weights, as a script without a seed does, train rank 0's model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.config import Config
from paceline.errors import RankFailed, TrainingError
from paceline.parallel.broadcast_weights import take_first_values
from paceline.trainer.run import engine_options

LAYOUTS = {
    2: ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2"],
    4: ["dp=4,zero=3,replicas=2", "dp=2,tp=2", "dp=2,pp=2", "dp=2,zero=3,pp=2", "tp=2,pp=2"],
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        # A table that no checkpoint holds, whole numbers, and what is neither.
        self.register_buffer("shift", torch.randn(width), persistent=False)
        self.register_buffer("order", torch.randperm(width))
        self.register_buffer("mask", torch.rand(width) > 0.3)
        self.register_buffer("level", torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.shift * self.mask) * self.level
        return x + self.down(F.gelu(self.up(y))) + self.frozen(x)[..., self.order]


class Model(nn.Module):
    """Tied, frozen, buffers of every kind; the head reads the embedding's weight."""

    def __init__(self, width: int = 8, tokens: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).double()


def batch(seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 12, (8, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def share_of(whole: Any, layout: Any) -> Any:
    place = layout.coordinate(paceline.World.current().rank)
    start, stop = paceline.data.share(len(whole[0]), place.dp, layout.dp)
    return tuple(t[start:stop] for t in whole)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(layout: str, seed_of: Any, steps: int = 2, **options: Any) -> dict[str, Tensor]:
    model = build(seed_of(paceline.World.current().rank))
    engine = paceline.Engine(model, loss=loss, optimizer=sgd, layout=layout, **options)
    for step in range(steps):
        engine.step(share_of(batch(step), engine.layout))
    return engine.whole_parameters() | engine.whole_buffers()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """What one process makes of rank 0's model."""
    return train("dp=1", lambda rank: 100)


@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.world(2)
def test_two_ranks_train_the_first_ones_model(
    layout: str, ranks: Any, alone: dict[str, Tensor]
) -> None:
    for found in ranks(train, layout, lambda rank: 100 + rank):
        assert_same(found, alone)


@pytest.mark.parametrize("layout", LAYOUTS[4])
@pytest.mark.world(4)
def test_four_ranks_train_the_first_ones_model(
    layout: str, ranks: Any, alone: dict[str, Tensor]
) -> None:
    assert_same(ranks(train, layout, lambda rank: 100 + rank)[3], alone)


@pytest.mark.world(2)
def test_prepare_and_the_trainer_start_from_the_first_ranks_model(ranks: Any) -> None:
    def job() -> list[bool]:
        rank = paceline.World.current().rank
        expected = build(100).state_dict() | dict(build(100).named_buffers())
        told = []
        for layout in ("dp=2", "dp=2,zero=3"):
            model = build(100 + rank)
            optimizer = sgd([p for p in model.parameters() if p.requires_grad])
            paceline.prepare(model, optimizer, layout=layout)
            told.append(_is(model, expected))
        model = build(100 + rank)

        class Watch(paceline.Callback):
            def on_fit_start(self, trainer: paceline.Trainer) -> None:
                told.append(_is(trainer.model, expected))

        trainer = paceline.Trainer(
            model, loss=loss, optimizer=sgd, global_batch=8, layout="dp=2,zero=2", progress=False
        )
        trainer.callbacks = [Watch()]
        data = [(x, y) for x, y in zip(*batch(), strict=True)]
        trainer.fit(data, steps=1)
        return told

    assert ranks(job) == [[True, True, True]] * 2


def _is(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    """Whether ``model`` has these values; a collective where it is cut."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    return all(torch.equal(value, expected[name]) for name, value in whole.items())


class Drawn(nn.Linear):
    """Initialised by numbers that torch's generator knows nothing of."""

    source: Any = None

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.tensor(Drawn.source(parameter.numel())).view_as(parameter))


def on_meta(layout: str, source: str) -> dict[str, Tensor]:
    import random

    world = paceline.World.current()
    own = random.Random(50 + world.rank)
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    draw = random.random if source == "global" else own.random
    Drawn.source = lambda count: [draw() for _ in range(count)]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Drawn(8, 8), nn.ReLU(), Drawn(8, 3))
    engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd, layout=layout)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    engine.step(share_of((x, torch.tensor([0, 1, 2, 0])), engine.layout))
    return engine.whole_parameters()


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.world(2)
def test_models_from_the_meta_device_get_what_one_process_would_give_them(
    layout: str, ranks: Any
) -> None:
    sources = ["global"] if layout == "pp=2" else ["global", "its own"]
    for source in sources:
        expected = on_meta("dp=1", source)
        for found in ranks(on_meta, layout, source):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.world(2)
def test_a_generator_of_its_own_is_refused_where_rank_0_does_not_initialise(ranks: Any) -> None:
    with pytest.raises(RankFailed, match=r"gets other values each time it is initialised"):
        ranks(on_meta, "pp=2", "its own")


def refusal(build_on: Any, layout: str = "dp=2,zero=3", **options: Any) -> str:
    rank = paceline.World.current().rank
    model, optimizer = build_on(rank)
    try:
        paceline.Engine(model, loss=loss, optimizer=optimizer, layout=layout, **options)
    except TrainingError as error:
        return str(error)
    return ""


def _other_lr(rank: int) -> Any:
    model = build(0)
    return model, torch.optim.SGD(model.parameters(), lr=0.1 + rank)


def _frozen(rank: int) -> Any:
    model = build(0)
    model.norm.requires_grad_(rank == 0)
    return model, sgd


def _half(rank: int) -> Any:
    model = build(0)
    return (model.float() if rank else model), sgd


DIFFERENCES = {
    "a shape": (
        lambda rank: (build(0, width=8 + 8 * rank), sgd),
        r"different models: .*embed.weight is a parameter, float64 \(12, 8\) on rank 0 and "
        r"a parameter, float64 \(12, 16\) on rank 1.*and \d+ more",
    ),
    "a dtype": (_half, r"different models: embed.weight is a parameter, float64"),
    "what is frozen": (_frozen, r"different models: norm.weight is a parameter.* frozen"),
    "a rate": (
        _other_lr,
        r"different optimizers: lr of group 0 is 0.1 on rank 0 and 1.1 on rank 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.world(2)
def test_what_cannot_be_taken_over_is_refused_on_all_ranks(what: str, ranks: Any) -> None:
    build_on, words = DIFFERENCES[what]
    first, second = ranks(refusal, build_on)
    assert re.search(words, first)
    assert first == second


@pytest.mark.world(2)
def test_layouts_and_optimizers_that_differ_are_refused(ranks: Any) -> None:
    def job() -> tuple[str, str]:
        rank = paceline.World.current().rank
        model = build(0)
        kinds = [torch.optim.SGD, torch.optim.AdamW]
        other = refusal(lambda r: (build(0), lambda p: kinds[r](p, lr=0.1)))
        return refusal(lambda _: (model, sgd), layout=["dp=2", "tp=2"][rank]), other

    for layouts, optimizers in ranks(job):
        assert "different settings: layout is 'dp=2' on rank 0 and 'dp=1,tp=2' on rank 1" in layouts
        assert "kind is SGD on rank 0 and AdamW on rank 1" in optimizers


@pytest.mark.world(2)
def test_the_optimizers_state_is_the_first_ranks(ranks: Any) -> None:
    def job() -> list[float]:
        rank = paceline.World.current().rank
        model = build(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        optimizer.step()
        optimizer.zero_grad()
        engine = paceline.Engine(model, loss=loss, optimizer=optimizer, layout="dp=2,zero=1")
        state = engine.state_dict()["optimizer"]["state"]
        return [float(entry["momentum_buffer"].mean()) for entry in state.values()]

    assert all(value == 1.0 for told in ranks(job) for value in told)


@pytest.mark.world(2)
def test_a_user_may_keep_what_each_rank_has_built(ranks: Any) -> None:
    def job() -> tuple[float, str, str]:
        rank = paceline.World.current().rank

        def built(_: int) -> Any:
            torch.manual_seed(0)
            model = nn.Linear(4, 4, bias=False)
            with torch.no_grad():
                model.weight.fill_(float(rank))
            return model, sgd

        model, optimizer = built(rank)
        engine = paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=optimizer,
            layout="dp=2,zero=3",
            initial_weights="own",
        )
        patchwork = float(engine.whole_parameters()["weight"].sum())
        same = refusal(built, layout="dp=2", initial_weights="own")
        unknown = refusal(built, layout="dp=2", initial_weights="mine")
        return patchwork, same, unknown

    for patchwork, same, unknown in ranks(job):
        assert patchwork == 8.0  # two rows of zeros, two of ones
        assert "ranks 0 and 1 both hold weight, with different values" in same
        assert "initial_weights='mine' must be 'rank0'" in unknown


@pytest.mark.world(2)
def test_values_of_every_kind_are_taken_over_in_bounded_pieces(ranks: Any) -> None:
    def job() -> tuple[list[str], bool, list[str]]:
        world = paceline.World.current()

        def make(rank: int) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(rank)
            wide = torch.randn(2, 3, 4, 4, generator=generator)
            image = wide.to(memory_format=torch.channels_last) if rank else wide
            return {
                "whole": torch.randn(64, generator=generator),
                "channels last": image,
                "expanded": torch.randn(1, 3, generator=generator).expand(5, 3),
                "transposed": torch.randn(7, 5, generator=generator).T,
                "number": torch.randn((), generator=generator, dtype=torch.float64),
                "flags": torch.rand(9, generator=generator) > 0.5,
                "complex": torch.randn(3, generator=generator, dtype=torch.complex64).conj(),
                "half": torch.randn(5, generator=generator).bfloat16(),
                "nothing": torch.empty(0, 3),
                "sparse": (torch.rand(4, 4, generator=generator) > 0.5).float().to_sparse(),
                "same": torch.arange(4),
            }

        own, expected = make(world.rank), make(0)
        # Pieces of 100 bytes: much less than the largest of them.
        differed = take_first_values(own, world.everyone, world.device, 100)
        again = take_first_values(own, world.everyone, world.device, 100)
        alike = all(torch.equal(own[n].to_dense(), t.to_dense()) for n, t in expected.items())
        return differed, alike, again

    for differed, alike, again in ranks(job):
        assert alike
        assert again == []
        assert {"whole", "channels last", "expanded", "transposed", "flags"} <= set(differed)
        assert "same" not in differed  # though it shares a piece with some that do


@pytest.mark.world(2)
def test_different_weights_are_told_once_and_equal_ones_not(ranks: Any) -> None:
    def job() -> tuple[list[str], list[str], list[str]]:
        rank = paceline.World.current().rank
        told = []
        for seed in (rank, 0):
            model = build(seed)
            engine = paceline.Engine(model, loss=loss, optimizer=sgd, layout="dp=2")
            told += [engine.take_notes()]
        return told[0], engine.take_notes(), told[1]

    for different, later, equal in ranks(job):
        assert "built different weights" in different[0]
        assert "start from rank 0's" in different[0]
        assert later == equal == []


def test_a_config_says_it_too() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    options = engine_options(Config(), None, optimizer)
    assert options["initial_weights"] == "rank0"
    options = engine_options(Config(initial_weights="own"), None, optimizer)
    assert options["initial_weights"] == "own"
