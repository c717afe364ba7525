"""The exchange by itself: what is sent and what is left add up, and why that is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.options import Compression
from paceline.sync.compressed.exchange import Exchange
from paceline.sync.compressed.formats import Turn
from paceline.sync.compressed.powersgd import PowerSGD
from paceline.sync.wire import Wire
from paceline.world import World

FORMS = ["fp16", "bf16", "int8", "sign", "topk:0.1", "randomk:0.1", "topk:0.1+fp16", "powersgd:3"]


def dyadic(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 1/16, with 127 as the largest of each 1024: float64 adds them up exactly.

    The scales of int8 are then 1, and those of signs sums of such numbers over 1024.
    """
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-2000, 2000, shape, generator=draw).double() / 16
    values.view(-1)[::1024] = 127.0
    return values


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("form", ["int8", "sign", "topk:0.1", "randomk:0.1", "topk:0.1+bf16"])
def test_what_is_left_and_what_was_sent_are_the_gradient_exactly(
    ranks: Any, size: int, form: str
) -> None:
    """And the mean of what all sent, with what rounding it lost, is the mean that is applied."""

    def job(form: str) -> Any:
        world = World.current()
        parameter = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
        exchange = Exchange(
            Compression(form, warmup_steps=0),
            {id(parameter): "w"},
            Wire(world.everyone.process_group),
        )
        gradient = dyadic((64, 64), world.rank)
        given, applied = gradient.clone(), gradient.clone()
        exchange.average([parameter], [applied], 0)
        exchange.settle(applied=True)
        kept = torch.zeros(64 * 64, dtype=torch.float64)
        for own in exchange.memory.kept.values():
            for _, first, values in own.parts():
                kept[first : first + len(values)] = values
        return given, exchange.memory.residuals["w"], applied, kept.view(64, 64)

    found = ranks(job, form, world_size=size)
    applied = found[0][2]
    sent = torch.stack([given - left for given, left, _, _ in found])
    kept = torch.stack([kept for _, _, _, kept in found]).sum(0)
    for given, left, other, _ in found:
        assert torch.equal(left + (given - left), given)
        assert torch.equal(other, applied)  # on every rank
    total = sent.sum(0)
    if size != 3 and form != "sign":  # thirds, and means of means, are not dyadic
        assert torch.equal(total / size, applied + kept)
    torch.testing.assert_close(total / size, applied + kept, rtol=1e-12, atol=1e-12)


@pytest.mark.world(3)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_lost_over_many_steps(ranks: Any, form: str) -> None:
    """What was applied in all steps, and what is left at the end, is the sum of all gradients."""

    def job(form: str) -> Any:
        world = World.current()
        parameter = nn.Parameter(torch.zeros(40, 50, dtype=torch.float64))
        options = Compression(form, error_feedback=True, warmup_steps=0)
        exchange = Exchange(options, {id(parameter): "w"}, Wire(world.everyone.process_group))
        draw = torch.Generator().manual_seed(world.rank)
        total, applied = torch.zeros(40, 50).double(), torch.zeros(40, 50).double()
        for step in range(12):
            exchange.step = step
            gradient = torch.randn(40, 50, generator=draw, dtype=torch.float64)
            total += gradient
            exchange.average([parameter], [gradient], 0)
            exchange.settle(applied=True)
            applied += gradient
        exchange.fold_kept()
        return total, applied, exchange.memory.residuals["w"]

    found = ranks(job, form)
    mean = torch.stack([total for total, _, _ in found]).mean(0)
    left = torch.stack([left for _, _, left in found]).mean(0)
    # 16-bit sums are rounded on the wire, where no rank can see what that lost.
    on_the_wire = 1e-1 if form in ("fp16", "bf16") else 1e-9
    torch.testing.assert_close(found[0][1] + left, mean, rtol=0, atol=on_the_wire)


@pytest.mark.world(2)
@pytest.mark.parametrize("form", ["topk:0.02", "sign"])
def test_without_feedback_training_is_visibly_worse(ranks: Any, form: str) -> None:
    """A regression whose few large gradients hide the many small ones."""

    def job(form: str, feedback: bool) -> float:
        world = World.current()
        draw = torch.Generator().manual_seed(0)
        scales = torch.logspace(0, -1.5, 64, dtype=torch.float64)
        inputs = torch.randn(256, 64, generator=draw, dtype=torch.float64) * scales
        truth = torch.randn(32, 64, generator=draw, dtype=torch.float64)
        targets = inputs @ truth.T
        own = slice(world.rank * 128, world.rank * 128 + 128)
        weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.float64))
        options = Compression(form, error_feedback=feedback, warmup_steps=0)
        exchange = Exchange(options, {id(weight): "w"}, Wire(world.everyone.process_group))
        for step in range(300):
            exchange.step = step
            error = inputs[own] @ weight.detach().T - targets[own]
            gradient = error.T @ inputs[own] / 128
            exchange.average([weight], [gradient], 0)
            exchange.settle(applied=True)
            with torch.no_grad():
                weight -= 0.3 * gradient
        return float((inputs @ weight.detach().T - targets).square().mean())

    with_feedback, without = ranks(job, form, True)[0], ranks(job, form, False)[0]
    assert with_feedback * 2 < without


@pytest.mark.world(3)
def test_factors_of_full_rank_are_the_mean(ranks: Any) -> None:
    def job() -> Any:
        world = World.current()
        draw = torch.Generator().manual_seed(world.rank)
        matrix = torch.randn(12, 5, 2, generator=draw, dtype=torch.float64)
        wire = Wire(world.everyone.process_group)
        found = PowerSGD(10).means({"w": matrix}, {}, wire, Turn(0, 0))
        mean = torch.empty_like(matrix)
        found.write("w", mean)
        return matrix, mean

    found = ranks(job)
    mean = torch.stack([matrix for matrix, _ in found]).mean(0)
    for _, near in found:
        torch.testing.assert_close(near, mean, rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_a_warm_start_comes_nearer_every_step(ranks: Any) -> None:
    """The same matrix again and again: its best factors are found by power iteration."""

    def job() -> Any:
        world = World.current()
        draw = torch.Generator().manual_seed(5)
        values = torch.randn(30, 20, generator=draw, dtype=torch.float64)
        left, _, right = torch.linalg.svd(values, full_matrices=False)
        sizes = 0.7 ** torch.arange(20, dtype=torch.float64)
        values = left * sizes @ right
        best = left[:, :2] * sizes[:2] @ right[:2]
        codec, wire, known = PowerSGD(2), Wire(world.everyone.process_group), {}
        distances = []
        for step in range(40):
            found = codec.means({"w": values}, known, wire, Turn(step, 0))
            known = found.right
            near = torch.empty_like(values)
            found.write("w", near)
            distances.append(float((near - best).norm()))
        return distances

    [distances, _] = ranks(job)
    assert distances[-1] < 0.05 * distances[0]
