"""One engine on many layouts: the same numbers, the same state, whoever holds which part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import Layout
from paceline.data import share
from paceline.models.gpt import GPT, token_cross_entropy
from paceline.testing import make_resnet

SAMPLES = 13  # shares of it are uneven on any number of ranks
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # float64 sums taken in another order, after Adam


def make_gpt(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab_size=33, context=8, layers=layers, heads=4, width=16, dropout=dropout)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 33, (SAMPLES, 9), generator=draw) for _ in range(steps)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def own_share(batch: Any, layout: Layout) -> Any:
    start, stop = share(SAMPLES, layout.coordinate(paceline.World.current().rank).dp, layout.dp)
    return tuple(part[start:stop] for part in batch)


def make_engine(layout: str, layers: int = 2, **options: Any) -> paceline.Engine:
    model = make_gpt(layers)
    return paceline.Engine(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=token_cross_entropy,
        layout=layout,
        precision="fp64",
        clip_norm=0.5,
        **options,
    )


def train(
    layout: str,
    steps: int = 3,
    state: Any = None,
    microbatch: int | None = None,
    schedule: str = "1f1b",
    layers: int = 2,
) -> Any:
    pipeline = paceline.Pipelining(schedule=schedule)
    engine = make_engine(layout, layers, microbatch=microbatch, pipeline=pipeline)
    data = batches(6)
    if state is not None:
        engine.load_state_dict(state)
    results = []
    for batch in data[engine.steps_done : engine.steps_done + steps]:
        result = engine.step(own_share(batch, engine.layout))
        results.append((result.loss, result.grad_norm, result.samples))
    return results, engine.state_dict()


@pytest.fixture(scope="module")
def alone() -> Any:
    return train("dp=1", steps=5)


LAYOUTS = [
    *("dp=2,zero=1", "dp=3,zero=2", "dp=4,zero=3,replicas=2", "tp=2", "dp=2,tp=2", "pp=2"),
    *("dp=2,zero=3,pp=2", "dp=2,zero=2,tp=2,pp=2"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_and_resumes_like_one_process(ranks: Any, alone: Any, layout: str) -> None:
    """Three steps on the layout, then two more on it from its saved state, which is whole."""
    numbers, last = alone

    # In one job: what torch finds out about a layout is then found out once. That a new process
    # goes on in the same way is tested below, and with checkpoints.
    def job() -> Any:
        first, state = train(layout, 3, None, 4)
        state = paceline.collectives.broadcast_object(state)
        return first, state["model"].keys(), *train(layout, 2, state, 4)

    for first, names, results, resumed in ranks(job, world_size=Layout.parse(layout).world_size):
        torch.testing.assert_close(first, numbers[:3], **TOLERANCE)
        assert names == last["model"].keys()
        torch.testing.assert_close(results, numbers[3:], **TOLERANCE)
        torch.testing.assert_close(resumed["model"], last["model"], **TOLERANCE)
        torch.testing.assert_close(resumed["optimizer"], last["optimizer"], **TOLERANCE)


@pytest.mark.world(2)
def test_a_rank_with_two_copies_of_a_tied_weight_resumes(ranks: Any) -> None:
    """zbv puts the first and the last of four stages, which share the embedding, on one rank."""
    [_, *numbers], _ = train("dp=1", steps=3, layers=4)
    state = train("dp=1", steps=1, layers=4)[1]
    for results, _ in ranks(train, "pp=2", 2, state, None, "zbv", 4):
        torch.testing.assert_close(results, numbers, **TOLERANCE)


@pytest.mark.world(4)
def test_state_moves_between_layouts(ranks: Any, alone: Any) -> None:
    state = train("dp=1", steps=1)[1]
    for layout in ("dp=4,zero=3", "dp=2,tp=2", "dp=2,pp=2"):
        state = ranks(train, layout, 1, state)[0][1]
    _, last = train("dp=1", 1, state)
    torch.testing.assert_close(last["model"], alone[1]["model"], **TOLERANCE)


@pytest.mark.parametrize("layout", ["dp=4,zero=3", "dp=2,tp=2", "dp=2,pp=2"])
@pytest.mark.world(4)
def test_evaluation_counts_every_sample_once(ranks: Any, layout: str) -> None:
    def job(layout: str) -> Any:
        engine = make_engine(layout, microbatch=2)
        batch = own_share(batches(1)[0], engine.layout)
        with engine.evaluating():
            found = engine.evaluate(batch)
        assert all(part.term.output.shape[0] == part.samples for part in found)
        return [(part.samples, float(part.term.total), int(part.term.count)) for part in found]

    total, count = token_cross_entropy(make_gpt().double()(batches(1)[0][0]), batches(1)[0][1])
    found = [part for own in ranks(job, layout) for part in own]
    assert sum(samples for samples, _, _ in found) == SAMPLES
    assert sum(items for _, _, items in found) == int(count)
    torch.testing.assert_close(sum(t for _, t, _ in found), float(total.detach()), **TOLERANCE)


@pytest.mark.world(2)
def test_peers_with_different_batches_are_told(ranks: Any) -> None:
    def job() -> str:
        engine = make_engine("tp=2")
        with pytest.raises(paceline.errors.DataError) as caught:
            engine.step(tuple(part[engine.world.rank :][:4] for part in batches(1)[0]))
        return str(caught.value)

    for message in ranks(job):
        assert "ranks 0 and 1 work on the same samples, but got different batches" in message
        assert "paceline.loader(..., layout=engine.layout)" in message


@pytest.mark.world(2)
def test_frozen_parameters_stay(ranks: Any) -> None:
    def job(layout: str) -> Any:
        model = make_gpt()
        model.blocks[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine = paceline.Engine(
            model, optimizer=optimizer, loss=token_cross_entropy, layout=layout, precision="fp64"
        )
        engine.step(own_share(batches(1)[0], engine.layout))
        return engine.state_dict()["model"]

    before = make_gpt().double().state_dict()
    expected = job("dp=1")
    for layout in ("dp=2,zero=3", "tp=2", "pp=2"):
        for state in ranks(job, layout):
            torch.testing.assert_close(state, expected, **TOLERANCE)
            torch.testing.assert_close(
                state["blocks.0.mlp.up.weight"], before["blocks.0.mlp.up.weight"]
            )


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=4,zero=3,replicas=2"])
def test_prepare_shards_for_a_loop_of_ones_own(ranks: Any, layout: str) -> None:
    def job(layout: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        draw = torch.Generator().manual_seed(3)
        x, y = torch.randn(11, 8, generator=draw).double(), torch.arange(11) % 4
        data = torch.utils.data.TensorDataset(x, y)
        model, optimizer, loader = paceline.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            paceline.loader(data, global_batch=5, seed=0),
            layout=layout,
        )
        for inputs, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]

    expected = job("dp=1")
    world_size = Layout.parse(layout).world_size
    for found in ranks(job, layout, world_size=world_size):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=2,tp=2"])
def test_fused_and_foreach_updates_take_split_and_whole_parameters(ranks: Any, layout: str) -> None:
    def run(layout: str, how: str) -> Any:
        model = make_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{how: True})
        engine = paceline.Engine(
            model, optimizer=optimizer, loss=token_cross_entropy, layout=layout, precision="fp64"
        )
        for batch in batches(2):
            engine.step(own_share(batch, engine.layout))
        assert len(optimizer.param_groups) == 1
        return engine.state_dict()["model"]

    def job(layout: str) -> Any:
        return {how: run(layout, how) for how in ("fused", "foreach")}

    expected = job("dp=1")
    for states in ranks(job, layout, world_size=Layout.parse(layout).world_size):
        for how, state in states.items():
            torch.testing.assert_close(
                state, expected[how], **TOLERANCE, msg=lambda text, how=how: f"{how}: {text}"
            )


@pytest.mark.parametrize("layout", ["dp=2,zero=2", "tp=2"])
@pytest.mark.world(2)
def test_an_fp16_overflow_on_one_rank_is_everyones(ranks: Any, layout: str) -> None:
    def job(layout: str) -> Any:
        model = make_gpt()
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda output, target: _exploding(output, target, engine),
            layout=layout,
            precision="fp16",
        )
        engine.steps = 0
        batch = own_share(batches(1)[0], engine.layout)
        first = engine.step(batch)
        before = engine.whole_parameters()
        engine.steps = 1
        second = engine.step(batch)
        return first.skipped, second.skipped, before, engine.whole_parameters()

    for first, second, before, after in ranks(job, layout):
        assert (first, second) == (False, True)
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def _exploding(output: torch.Tensor, target: torch.Tensor, engine: Any) -> Any:
    """In step 1 the first data-parallel rank's gradient overflows fp16, while its loss does not."""
    total, count = token_cross_entropy(output, target)
    bad = engine.steps == 1 and engine.coordinate.dp == 0
    return (total + (1e4 * (total - total.detach()) if bad else 0)), count


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.world(2)
def test_a_model_from_the_meta_device_starts_with_the_same_values(ranks: Any, layout: str) -> None:
    def job(layout: str) -> list[float]:
        torch.manual_seed(5)
        with torch.device("meta"):
            model = GPT(vocab_size=33, context=8, layers=2, heads=4, width=16)
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            loss=token_cross_entropy,
            layout=layout,
            precision="fp64",
        )
        return [engine.step(own_share(batch, engine.layout)).loss for batch in batches(2)]

    expected = job("dp=1")
    for losses in ranks(job, layout):
        torch.testing.assert_close(losses, expected, **TOLERANCE)


@pytest.mark.parametrize("layout", ["dp=2,zero=2", "tp=2", "pp=2"])
@pytest.mark.world(2)
def test_resumed_at_the_same_layout_a_run_is_equal_to_the_bit(ranks: Any, layout: str) -> None:
    uninterrupted, (_, state) = ranks(lambda: [train(layout, n, None, 4) for n in (3, 1)])[0]
    results, resumed = ranks(train, layout, 2, state, 4)[0]
    assert results == uninterrupted[0][1:]
    torch.testing.assert_close(resumed["model"], uninterrupted[1]["model"], rtol=0, atol=0)


def test_placeholders_of_a_pipeline_enter_no_statistics(ranks: Any) -> None:
    """Shares of 4 and 3 samples, one by one: the second pipeline fills up with a placeholder."""
    model = make_resnet()
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(7, 3, 8, 8, generator=draw)
    report = paceline.verify(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=F.cross_entropy,
        data=torch.utils.data.TensorDataset(images, torch.arange(7) % 4),
        layouts=["dp=2,pp=2,schedule=gpipe,microbatch=1"],
        global_batch=7,
        steps=1,
        sync_batchnorm=True,
        pool=ranks.pool,
    )
    assert report.ok, str(report)
