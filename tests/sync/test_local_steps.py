"""Replicas that train alone and meet: against simulations of them in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.engine.internals import internals_of
from paceline.errors import LayoutError, NonFiniteError, TrainingError
from paceline.sync.local_sgd import LocalSGD
from sync.local_cases import (
    CASES,
    EXACT,
    STEPS,
    Wide,
    adam,
    everything,
    make_engine,
    my_share,
    net,
    samples,
    sgd,
    share_of,
    wait_for,
    weights,
    wide_engine,
)


class Simulation:
    """Replicas in one process, written as the papers have it, the outer optimizer being torch's."""

    def __init__(
        self,
        options: paceline.LocalSteps,
        replicas: int,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        n: int = 7,
    ) -> None:
        self.options, self.n = options, n
        self.models = [net() for _ in range(replicas)]
        self.optimizers = [optimizer(model) for model in self.models]
        self.shared = net()
        lr, momentum = options.outer_lr, options.outer_momentum
        if options.method == "average":
            lr, momentum = 1.0, 0.0
        self.outer = [
            torch.optim.SGD([p], lr=lr, momentum=momentum, nesterov=momentum > 0)
            for p in self.shared.parameters()
        ]
        count = len(list(self.shared.parameters()))
        self.counted = [[0] * count for _ in range(replicas)]
        self.under_way: list[tuple[int, int, torch.Tensor, list[torch.Tensor]]] = []

    def fragment_of(self, step: int) -> list[int]:
        """Which parameters meet after ``step``: the test's own reading of the rhythm."""
        every, fragments = self.options.every, self.options.fragments
        sizes = [p.numel() for p in self.shared.parameters()]
        for fragment in range(fragments):
            if step % every == (fragment + 1) * every // fragments % every:
                edges = [sum(sizes) * f / fragments for f in range(fragments + 1)]
                middles = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]
                low, high = edges[fragment], edges[fragment + 1]
                return [i for i, middle in enumerate(middles) if low <= middle < high]
        return []

    @torch.no_grad()
    def begin_meeting(self, step: int, place: int) -> None:
        own = [list(model.parameters())[place].clone() for model in self.models]
        counts = [counted[place] for counted in self.counted]
        mean = torch.zeros_like(own[0])
        for value, count in zip(own, counts, strict=True):
            mean += count / sum(counts) * (list(self.shared.parameters())[place] - value)
        for counted in self.counted:
            counted[place] = 0
        self.under_way.append((step + self.options.overlap, place, mean, own))

    @torch.no_grad()
    def end_meetings(self, step: int) -> None:
        for _, place, mean, own in [m for m in self.under_way if m[0] <= step]:
            shared = list(self.shared.parameters())[place]
            shared.grad = mean
            self.outer[place].step()
            for model, then in zip(self.models, own, strict=True):
                parameter = list(model.parameters())[place]
                parameter.copy_(shared + (parameter - then))
        self.under_way = [m for m in self.under_way if m[0] > step]

    def step(self, step: int) -> None:
        batch = samples(self.n, 100 + step)
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            x, y = share_of(batch, index, len(self.models))
            optimizer.zero_grad()
            if len(x):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            self.counted[index] = [count + len(x) for count in self.counted[index]]
        self.end_meetings(step + 1)
        for place in self.fragment_of(step + 1):
            self.begin_meeting(step + 1, place)
        self.end_meetings(step + 1)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.world(3)
def test_averaging_after_every_sgd_step_is_synchronous_training(
    ranks: Any, microbatch: int | None
) -> None:
    """Three ranks take 3, 2 and 2 of 7 samples; with 2 samples the third has none."""

    def job(local_steps: Any) -> Any:
        engine = make_engine(local_steps=local_steps, microbatch=microbatch)
        results = [engine.step(my_share(step, 2 if step == 1 else 7)) for step in range(4)]
        return weights(engine), [(r.loss, r.samples) for r in results]

    alone = paceline.LocalSteps(every=1, method="average")
    together, apart = ranks(job, None), ranks(job, alone)
    for (expected, expected_told), (found, told) in zip(together, apart, strict=True):
        torch.testing.assert_close(found, expected, **EXACT)
        assert [n for _, n in told] == [n for _, n in expected_told] == [7, 2, 7, 7]
        torch.testing.assert_close(
            [loss for loss, _ in told], [loss for loss, _ in expected_told], **EXACT
        )


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_do_what_a_simulation_of_them_does(
    ranks: Any, size: int, name: str, optimizer: Any
) -> None:
    options = CASES[name]

    def job() -> Any:
        engine = make_engine(optimizer, local_steps=options)
        trail = []
        for step in range(STEPS):
            engine.step(my_share(step))
            trail.append(weights(engine))
        with engine.evaluating():
            shared = weights(engine)
        assert all(map(torch.equal, weights(engine), trail[-1]))  # put back afterwards
        return trail, shared

    simulation = Simulation(options, size, optimizer)
    results = ranks(job, world_size=size)
    for step in range(STEPS):
        simulation.step(step)
        for index, (trail, _) in enumerate(results):
            expected = [p.detach() for p in simulation.models[index].parameters()]
            torch.testing.assert_close(trail[step], expected, rtol=0, atol=1e-10)
    for _, shared in results:
        expected = [p.detach() for p in simulation.shared.parameters()]
        torch.testing.assert_close(shared, expected, rtol=0, atol=1e-10)
        assert all(map(torch.equal, shared, results[0][1]))  # to the bit on all replicas


@pytest.mark.world(2)
def test_a_replica_without_samples_for_a_round_is_left_out_of_it(ranks: Any) -> None:
    def job() -> Any:
        engine = make_engine(adam, local_steps=paceline.LocalSteps(every=3, method="average"))
        for step in range(6):
            x, y = my_share(step)
            gone = step < 3 and paceline.World.current().rank == 1
            engine.step((x[:0], y[:0]) if gone else (x, y))
            if step == 2:
                first_round = weights(engine)
        return first_round, weights(engine)

    def alone() -> Any:
        model = net()
        optimizer = adam(model)
        for step in range(3):
            x, y = share_of(samples(7, 100 + step), 0, 2)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    results = ranks(job)
    for first_round, last in results:
        torch.testing.assert_close(first_round, alone(), **EXACT)
        assert all(map(torch.equal, last, results[0][1]))


@pytest.mark.parametrize("when", ["loss", "parameters"])
@pytest.mark.world(2)
def test_a_replica_that_is_not_finite_skips_and_the_others_do_not_notice(
    ranks: Any, when: str
) -> None:
    def job(spoilt: bool) -> Any:
        engine = make_engine(
            local_steps=paceline.LocalSteps(every=3, method="average"), nonfinite="skip"
        )
        told = []
        for step in range(6):
            x, y = my_share(step)
            bad = spoilt and step == 1 and paceline.World.current().rank == 1
            if bad and when == "loss":
                x = x * float("inf")
            if bad and when == "parameters":
                with torch.no_grad():
                    next(engine.model.parameters()).fill_(float("nan"))
            result = engine.step((x, y))
            told.append((result.skipped, result.problem.ranks if result.problem else []))
        return weights(engine), told

    results = ranks(job, True)
    skipped = [1] if when == "loss" else [1, 2]
    for found, told in results:
        assert all(bool(w.isfinite().all()) for w in found)
        assert all(map(torch.equal, found, results[0][0]))
        assert told == [
            (step in skipped, [1] if step in skipped else []) for step in range(6)
        ]  # on both ranks, though one of them had nothing to skip


@pytest.mark.world(2)
def test_a_replica_that_has_to_stop_stops_all_at_the_same_step(ranks: Any) -> None:
    def job() -> Any:
        engine = make_engine(local_steps=100)
        for step in range(30):
            x, y = my_share(step)
            if step == 4 and paceline.World.current().rank == 1:
                x = x * float("nan")
            try:
                engine.step((x, y))
            except NonFiniteError as error:
                return step, error.step, error.ranks, str(error)
        return None

    first, second = ranks(job)
    assert first == second
    step, told, bad, message = first
    assert (step, told, bad) == (12, 5, (1,))
    assert "nan on rank 1" in message


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.world(2)
def test_within_a_round_nobody_waits_for_a_replica_that_stands_still(
    ranks: Any, tmp_path: Any, overlap: int
) -> None:
    """Rank 1 does nothing until rank 0 is 8 steps on: waiting for each other would hang."""

    def job() -> Any:
        rank = paceline.World.current().rank
        engine = make_engine(local_steps=paceline.LocalSteps(every=20, overlap=overlap))
        results = [engine.step(my_share(0))]
        mark = tmp_path / f"ahead-{overlap}"
        if rank == 1:
            wait_for(mark.exists)
        results += [engine.step(my_share(step)) for step in range(1, 9)]
        if rank == 0:
            mark.touch()
        results += [engine.step(my_share(step)) for step in range(9, 24)]
        return [result.loss for result in results]

    first, second = ranks(job)
    assert first == second


@pytest.mark.world(3)
def test_bytes_are_those_of_meetings_and_a_few_for_the_numbers(ranks: Any) -> None:
    def job(exchange: str) -> Any:
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 3)).double()
        options = paceline.LocalSteps(every=4, exchange=exchange)
        engine = paceline.Engine(
            model, loss=F.cross_entropy, optimizer=sgd(model), local_steps=options
        )
        for step in range(8):
            engine.step(my_share(step))
        sync = internals_of(engine).sync
        assert isinstance(sync, LocalSGD)
        parameters = sum(p.numel() * p.element_size() for p in engine.model.parameters())
        return sync.loop.wire.sent, parameters

    plain, quantised = ranks(job, "none"), ranks(job, "int8")
    for (sent, size), (fewer, _) in zip(plain, quantised, strict=True):
        meetings = 2 * (4 / 3) * size
        assert meetings < sent < meetings + 8 * 100
        assert fewer < sent / 2


@pytest.mark.world(2)
def test_quantised_meetings_come_near_those_in_full(ranks: Any) -> None:
    def job(exchange: str) -> Any:
        engine = wide_engine(paceline.LocalSteps(every=2, exchange=exchange))
        start = everything(engine)
        for step in range(12):
            engine.step(my_share(step))
        found = everything(engine)
        return {k: (v, start[k]) for k, v in found.items() if v.is_floating_point()}

    plain, quantised = ranks(job, "none"), ranks(job, "int8")
    key = "layers.0.weight"
    expected, start = plain[0][key]
    found, _ = quantised[0][key]
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * (expected - start).norm()
    assert all(torch.equal(quantised[0][k][0], quantised[1][k][0]) for k in quantised[0])


@pytest.mark.world(2)
def test_buffers_are_averaged_when_replicas_meet(ranks: Any) -> None:
    """Weighted by samples, 4 and 3 of 7; what never changes is not touched."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, x: torch.Tensor) -> Any:
            self.mean += x.mean().detach()
            return self.inner(x)

    def job() -> Any:
        model = Masked()
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd(model), local_steps=2)
        engine.step(my_share(0))
        engine.step(my_share(1))
        return model.mean.clone(), model.mask.clone()

    expected = sum(
        w / 7 * share_of(samples(7, 100 + step), rank, 2)[0].mean()
        for rank, w in enumerate((4, 3))
        for step in range(2)
    )
    for mean, mask in ranks(job):
        torch.testing.assert_close(mean, expected, **EXACT)
        assert mask.tolist() == [0.0, float("-inf")]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every": 0}, "every=0 must be a whole number, 1 or more"),
        ({"every": 4, "overlap": 4}, "overlap=4 must be below every=4"),
        ({"every": 4, "fragments": 5}, "fragments=5 with every=4"),
        ({"method": "adam"}, "method='adam' must be one of average, diloco"),
        ({"outer_lr": 0}, "outer_lr=0 must be above 0"),
        ({"outer_momentum": 1}, "outer_momentum=1 must be from 0 to below 1"),
        ({"exchange": "int9"}, "there is no format 'int9'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: Any, told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        paceline.LocalSteps(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layout": "dp=2,zero=1"}, "zero=1 spreads a model"),
        ({"layout": "tp=2"}, "tp=2 spreads a model"),
        ({"layout": "pp=2"}, "pp=2 spreads a model"),
        ({"sync_batchnorm": True}, "sync_batchnorm normalises over all ranks"),
        ({"compress": "int8"}, "compress is about how gradients travel"),
    ],
)
@pytest.mark.world(2)
def test_what_does_not_go_together_is_refused_with_the_reason(
    ranks: Any, options: Any, told: str
) -> None:
    def job() -> str:
        try:
            make_engine(local_steps=4, **options)
        except LayoutError as error:
            return str(error)
        return ""

    assert all(told in message for message in ranks(job))


def test_something_else_than_a_number_of_steps_is_refused() -> None:
    with pytest.raises(TrainingError, match="local_steps='often' must be a number of steps"):
        make_engine(local_steps="often")


@pytest.mark.world(2)
def test_compression_counts_for_the_synchronous_start(ranks: Any) -> None:
    def job() -> Any:
        model = Wide()
        engine = paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=sgd(model),
            compress="int8",
            local_steps=paceline.LocalSteps(every=2, start=2),
        )
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        sent = []
        for step in range(6):
            engine.step(my_share(step))
            sent.append(averaging.exchange.wire.sent)
        return sent, everything(engine)

    (sent, first), (_, second) = ranks(job)
    assert 0 < sent[0] < sent[1] == sent[-1]
    assert all(torch.equal(first[k], second[k]) for k in first if first[k].is_floating_point())
