"""Memory by kind: what a model and its optimizer hold, and what a step needs, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.engine import Engine
from paceline.engine.memory import Memory, MemoryMeter, measure
from paceline.events import Event, MemoryMeasured
from paceline.parallel.recompute import recompute
from paceline.track.scalars import scalars

CPU = torch.device("cpu")
FLOAT = 4


def tanh_chain(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers))
    )


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Memory:
    meter = MemoryMeter(model, optimizer, CPU)
    with meter.step():
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return meter.memory()


def test_what_stands_is_counted_by_kind() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    parameters = (8 * 4 + 4 + 4 + 4) * FLOAT
    buffers = 2 * 4 * FLOAT + 8  # the running mean and variance, and an int64 count
    before = measure(model, optimizer, CPU)
    assert (before.parameters, before.gradients, before.optimizer) == (parameters, 0, 0)
    assert before.buffers == buffers
    assert (before.activations, before.peak) == (None, None)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    after = measure(model, optimizer, CPU)
    steps = len(optimizer.state) * FLOAT
    assert (after.gradients, after.optimizer) == (parameters, 2 * parameters + steps)
    assert after.current == sum(after.devices["cpu"].values())
    assert after.current == 4 * parameters + steps + buffers
    assert after.process > after.current
    mib = after.mib()
    assert mib["process"] == after.process / 2**20
    assert "devices" not in mib


def test_activations_of_a_step_by_hand() -> None:
    samples, width, layers = 128, 64, 4
    model = tanh_chain(layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = one_step(model, optimizer, torch.randn(samples, width))
    tensor, weight = samples * width * FLOAT, width * width * FLOAT
    # Kept for the backward: each tanh's output (the batch stood before). Then, going back through
    # the last layer: the gradient of its tanh's input and, just computed, that of its weight. The
    # loss and its gradient are a number each.
    assert memory.activations == layers * tensor + tensor + weight + 2 * FLOAT
    assert memory.gradients == layers * weight
    assert memory.parameters == layers * weight
    assert memory.peak is not None
    assert memory.peak >= memory.parameters + memory.activations


def test_accumulated_gradients_are_no_activations() -> None:
    model = tanh_chain(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once = one_step(model, optimizer, torch.randn(128, 64))
    meter = MemoryMeter(model, optimizer, CPU)
    with meter.step():
        for _ in range(3):
            model(torch.randn(128, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    several = meter.memory()
    assert several.gradients == once.gradients
    batch = 128 * 64 * FLOAT  # these are made inside the step
    assert several.activations == once.activations + batch


def test_a_checkpointed_model_holds_less() -> None:
    batch, width, layers = torch.randn(256, 32), 32, 6

    def deep() -> nn.Sequential:
        blocks = [
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
            for _ in range(layers)
        ]
        return nn.Sequential(*blocks)

    whole, saving = deep(), deep()
    assert len(recompute(saving, "full")) == layers
    figures = [
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch).activations
        for model in (whole, saving)
    ]
    tensor = 256 * width * FLOAT
    assert figures[0] is not None
    assert figures[1] is not None
    assert figures[0] >= layers * 4 * tensor
    # Each block's input, and what one block has inside it while it is recomputed.
    assert figures[1] <= (layers + 4 + 3) * tensor


def test_shared_storages_count_once_and_frozen_parameters_have_no_gradient() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model.append(nn.Identity())
    model.frozen = frozen
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1, momentum=0.9)
    memory = measure(model, optimizer, CPU)
    assert memory.parameters == (10 * 4 + 4 * 4) * FLOAT
    flat = torch.zeros(100)
    model[0].weight.grad = flat[:40].view(10, 4)  # a view holds the whole of what it looks at
    assert measure(model, optimizer, CPU).gradients == 100 * FLOAT


def test_sparse_gradients_and_meta_parameters() -> None:
    model = nn.Embedding(1000, 4, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    assert measure(model, None, CPU).gradients == 2 * 4 * FLOAT + 2 * 8
    assert measure(nn.Linear(4, 4, device="meta"), None, CPU).parameters == 0


def test_a_step_of_the_engine_and_nothing_left_behind() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())
    engine = Engine(model, loss=nn.MSELoss(), optimizer=optimizer, microbatch=4)
    meter = MemoryMeter(model, optimizer, engine.device)
    batch = torch.randn(16, 8), torch.randn(16, 1)
    with meter.step():
        engine.step(batch)
    memory = meter.memory()
    assert memory.gradients == memory.parameters == 9 * FLOAT
    assert memory.optimizer == 2 * 9 * FLOAT + 2 * FLOAT
    assert memory.activations
    assert "activations" in str(memory)
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with pytest.raises(RuntimeError, match="mine"), meter.step():
        raise RuntimeError("mine")
    assert not optimizer._optimizer_step_pre_hooks


def sharded_step() -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    model = tanh_chain(4, 64)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    memory = one_step(model, optimizer, torch.randn(8, 64))
    return [memory.parameters, memory.gradients, memory.optimizer, len(optimizer.state)]


@pytest.mark.world(2)
def test_a_shard_counts_what_this_rank_holds(ranks: Any) -> None:
    whole = 4 * 64 * 64 * FLOAT
    for parameters, gradients, optimizer, count in ranks(sharded_step):
        assert parameters == whole / 2
        assert gradients == whole / 2
        assert optimizer == whole + count * FLOAT


def test_the_event_is_read_back_and_gives_the_fullest_rank() -> None:
    event = MemoryMeasured(
        step=3,
        parameters=[10, 20],
        gradients=[1, 2],
        optimizer=[3, 4],
        buffers=[0, 0],
        activations=[7, 5],
        peak=[30, 40],
        current=[20, 30],
    )
    assert Event.from_json(event.to_json()) == event
    assert dict(scalars(event))["memory/peak"] == 40
    assert dict(scalars(event))["memory/activations"] == 7
