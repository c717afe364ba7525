"""Engines get the shares of their own layout, whatever was made first, or say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.errors import DataError

N = 24


def dataset() -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def engine(layout: str = "auto", **options: Any) -> paceline.Engine:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss()
    return paceline.Engine(
        made, optimizer=optimizer, loss=loss, layout=layout, precision="fp64", **options
    )


def losses(made: paceline.Engine, data: Any) -> list[float]:
    return [made.step(batch).loss for batch in data]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(engine(), paceline.loader(dataset(), global_batch=6))


@pytest.mark.world(2)
def test_a_loader_does_not_follow_the_engine_made_last(ranks: Any, alone: list[float]) -> None:
    def job() -> Any:
        before = paceline.loader(dataset(), global_batch=6)
        split, replicated = engine("tp=2"), engine("dp=2")
        after = paceline.loader(dataset(), global_batch=6)
        for_split = paceline.loader(dataset(), global_batch=6, layout=split.layout)
        found = [losses(replicated, before), losses(engine("dp=2"), after)]
        found.append(losses(split, for_split))
        messages = []
        for made, data in ((engine("tp=2"), before), (engine("dp=2,zero=3"), for_split)):
            with pytest.raises(DataError) as caught:
                losses(made, data)
            messages.append(str(caught.value))
        return found, messages

    for found, messages in ranks(job):
        for each in found:
            assert each == pytest.approx(alone, rel=1e-9)
        assert "cut for layout 'dp=2'" in messages[0]
        assert "the engine has layout 'dp=1,tp=2'" in messages[0]
        assert "cut for layout 'dp=1,tp=2'" in messages[1]
        assert all("layout=engine.layout" in message for message in messages)


@pytest.mark.world(2)
def test_a_trainer_and_prepare_give_a_loader_their_layout(ranks: Any) -> None:
    def job() -> Any:
        early = paceline.loader(dataset(), global_batch=6)
        explicit = paceline.loader(dataset(), global_batch=6, layout="dp=2")

        def fit(data: Any) -> list[float]:
            made = model()
            trainer = paceline.Trainer(
                made,
                loss=nn.CrossEntropyLoss(),
                optimizer=torch.optim.SGD(made.parameters(), lr=0.1),
                layout="tp=2",
                precision="fp64",
                progress=False,
            )
            return trainer.fit(data, epochs=1).losses

        found = fit(early)
        with pytest.raises(DataError, match=r"made for layout 'dp=2'.*has layout 'dp=1,tp=2'"):
            fit(explicit)
        made = model()
        wrong = paceline.loader(dataset(), global_batch=6, layout="tp=2")
        with pytest.raises(DataError, match=r"made for layout 'dp=1,tp=2'"):
            paceline.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1), wrong)
        return found

    alone = losses(engine(), paceline.loader(dataset(), global_batch=6))
    for found in ranks(job):
        assert found == pytest.approx(alone, rel=1e-9)


@pytest.mark.world(2)
def test_peers_that_come_to_differ_are_told(ranks: Any) -> None:
    def job() -> tuple[int, str]:
        made = engine("tp=2")
        x, y = dataset().tensors
        try:
            for step in range(16):
                shift = step >= 5 and made.world.rank
                made.step((x + float(shift), y))
        except DataError as error:
            return made.steps_done, str(error)
        return 16, ""

    for steps, message in ranks(job):
        assert steps == 7
        assert "ranks 0 and 1 work on the same samples, but got different batches" in message


class Sharded(IterableDataset[Any]):
    """Picks its samples by rank, as WebDataset's split_by_node does."""

    def __iter__(self) -> Iterator[Any]:
        world = paceline.World.current()
        x, y = dataset().tensors
        return iter(list(zip(x, y, strict=True))[world.rank :: world.size])


@pytest.mark.world(2)
def test_data_that_differs_is_an_error_at_every_entry(ranks: Any) -> None:
    def job() -> list[tuple[str, int]]:
        found = []

        def own_loop() -> Iterator[int]:
            made = engine()
            for batch in paceline.loader(Sharded(), global_batch=6):
                yield made.step(batch).step

        def prepared() -> Iterator[int]:
            made = model()
            optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
            data = paceline.loader(Sharded(), global_batch=6)
            wrapped, optimizer, batches = paceline.prepare(made, optimizer, data)
            for step, (x, y) in enumerate(batches, 1):
                F.cross_entropy(wrapped(x), y).backward()
                yield step

        def trained() -> Iterator[int]:
            made = model()
            trainer = paceline.Trainer(
                made,
                loss=nn.CrossEntropyLoss(),
                optimizer=torch.optim.SGD(made.parameters(), lr=0.1),
                global_batch=6,
                precision="fp64",
                progress=False,
            )
            trainer.fit(Sharded(), epochs=1)
            yield trainer.step

        for entry in (own_loop, prepared, trained):
            steps = 0
            try:
                for steps in entry():  # noqa: B007
                    pass
            except DataError as error:
                found.append((str(error), steps))
        return found

    for own_loop, prepared, trained in ranks(job):
        for message, steps in (own_loop, prepared, trained):
            assert "ranks do not read the same data" in message
            assert steps <= 1
        assert prepared[1] == trained[1] == 0  # these know that all ranks read


@pytest.mark.world(2)
def test_streams_sharded_by_rank_train_on_every_sample(ranks: Any) -> None:
    def job() -> tuple[int, list[int]]:
        made = model()
        trainer = paceline.Trainer(
            made,
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(made.parameters(), lr=0.1),
            global_batch=5,
            precision="fp64",
            progress=False,
            data=paceline.DataOptions(sharded_by_rank=True),
        )
        history = trainer.fit(Sharded(), dataset(), epochs=2)
        return history.samples, [step.samples for step in history.steps]

    for samples, steps in ranks(job):
        assert samples == 2 * N
        # Rank 0 takes three samples a step, rank 1 two: its stream lasts longer.
        assert steps == [5, 5, 5, 5, 2, 2] * 2


def accumulate(kind: str, microbatches: int) -> dict[str, torch.Tensor]:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    ranks = paceline.World.current().size
    data: Any = DataLoader(dataset(), batch_size=10 // ranks // microbatches or 1, shuffle=True)
    if kind == "global":
        data = paceline.loader(dataset(), global_batch=10, accumulate=microbatches, seed=4)
        wrapped, optimizer, batches = paceline.prepare(made, optimizer, data)
    else:
        each = data.batch_size
        wrapped, optimizer, batches = paceline.prepare(
            made, optimizer, data, per_device_batch=each, accumulate=microbatches, seed=4
        )
    assert batches is not None
    assert batches.accumulate == microbatches
    for x, y in batches:
        sync = batches.ends_step or ranks == 1
        with torch.autograd.set_grad_enabled(True):
            loss = F.cross_entropy(wrapped(x), y) * batches.weight
            if sync:
                loss.backward()
            else:
                with wrapped.no_sync():
                    loss.backward()
        if batches.ends_step:
            optimizer.step()
            optimizer.zero_grad()
    return made.state_dict()


@pytest.mark.parametrize("kind", ["global", "per device"])
def test_prepare_accumulates_to_the_gradient_of_the_global_batch(ranks: Any, kind: str) -> None:
    # 24 samples in batches of 10: the last one is short, and one rank's share of it too.
    alone = accumulate(kind, 1)
    for state in ranks(accumulate, kind, 5, world_size=2):
        torch.testing.assert_close(state, alone, rtol=1e-9, atol=1e-12)
