"""`prepare`: a hand-written backward loop, spread over ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import DataError, LayoutError, RankFailed, TrainingError

N = 23


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), data


def hand_written_loop(kind: str, batch: int) -> dict[str, torch.Tensor]:
    model, optimizer, data = parts()
    if kind == "paceline":
        loader: Any = paceline.loader(data, global_batch=batch, seed=4)
    else:
        loader = DataLoader(data, batch_size=batch, shuffle=True)
    wrapped, optimizer, prepared = paceline.prepare(model, optimizer, loader, seed=4)
    assert prepared is not None
    assert len(prepared) == -(-N // batch)
    for _ in range(2):
        for x, y in prepared:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("kind", ["paceline", "torch"])
def test_any_number_of_ranks_trains_the_same_model(ranks: Any, kind: str) -> None:
    alone = hand_written_loop(kind, 6)
    for size in (2, 3, 4):
        for state in ranks(hand_written_loop, kind, 6, world_size=size):
            torch.testing.assert_close(state, alone, rtol=1e-10, atol=1e-12)


def test_ranks_without_samples_count_for_nothing(ranks: Any) -> None:
    # 23 samples in batches of 11 leave a last batch of 1: three of four ranks have none.
    alone = hand_written_loop("paceline", 11)
    for state in ranks(hand_written_loop, "paceline", 11, world_size=4):
        torch.testing.assert_close(state, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_accumulation_with_no_sync(ranks: Any) -> None:
    def job() -> Any:
        model, optimizer, data = parts()
        data = TensorDataset(*(t[:20] for t in data.tensors))
        loader = paceline.loader(data, global_batch=4, seed=4)
        wrapped, optimizer, loader = paceline.prepare(model, optimizer, loader)
        for index, (x, y) in enumerate(loader):
            last = index == 4 or paceline.World.current().size == 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                F.cross_entropy(wrapped(x), y).div(5).backward()
        optimizer.step()
        return model.state_dict()

    alone = job()
    for state in ranks(job):
        torch.testing.assert_close(state, alone, rtol=1e-10, atol=1e-12)


def test_loader_state_continues_where_it_stopped() -> None:
    model, optimizer, data = parts()
    loader = paceline.loader(data, global_batch=6, seed=4)
    _, _, first = paceline.prepare(model, optimizer, loader)
    batches = [x for x, _ in first]
    _, _, second = paceline.prepare(model, optimizer, paceline.loader(data, global_batch=6, seed=4))
    for _ in second:
        break
    state = second.state_dict()
    _, _, third = paceline.prepare(model, optimizer, paceline.loader(data, global_batch=6, seed=4))
    third.load_state_dict(state)
    rest = [x for x, _ in third]
    assert len(rest) == len(batches) - 1
    assert all(torch.equal(a, b) for a, b in zip(rest, batches[1:], strict=True))


def test_wrong_calls() -> None:
    model, optimizer, data = parts()
    with pytest.raises(TrainingError, match=r"model=\[\] must be a torch.nn.Module"):
        paceline.prepare([], optimizer)
    with pytest.raises(DataError, match=r"loader must come from paceline.loader\(...\) or be"):
        paceline.prepare(model, optimizer, data)
    with pytest.raises(LayoutError, match=r"needs 2 ranks"):
        paceline.prepare(model, optimizer, layout="dp=2")


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters; a collective where they are cut."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in found.items()}


def accumulate(layout: str, thaw: bool = False) -> dict[str, torch.Tensor]:
    """Two backwards a step, the first of them under ``no_sync``, as training.md has it."""
    model, _, data = parts()
    first, last = model[0], model[2]
    first.requires_grad_(not thaw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = paceline.loader(data, global_batch=6, seed=4, drop_last=True)
    wrapped, optimizer, prepared = paceline.prepare(model, optimizer, loader, layout=layout)
    assert prepared is not None
    batches = list(prepared)[:2]
    for step in range(3):
        if thaw and step == 1:
            first.requires_grad_(True)
            last.bias.requires_grad_(False)
        for number, (x, y) in enumerate(batches):
            with contextlib.nullcontext() if number else wrapped.no_sync():
                (F.cross_entropy(wrapped(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_the_loop_of_the_guide_runs_on_every_layout(ranks: Any) -> None:
    alone = accumulate("dp=1")
    for layout in ("dp=1,zero=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"):
        for state in ranks(accumulate, layout, world_size=int(layout[3])):
            torch.testing.assert_close(state, alone, rtol=1e-10, atol=1e-12)


def test_unfreezing_is_followed_where_it_can_be_and_refused_elsewhere(ranks: Any) -> None:
    alone = accumulate("dp=1", thaw=True)
    for layout in ("dp=2,zero=1", "dp=2,zero=3"):
        for state in ranks(accumulate, layout, True, world_size=2):
            torch.testing.assert_close(state, alone, rtol=1e-10, atol=1e-12)
    with pytest.raises(RankFailed, match=r"0.weight was unfrozen after prepare\(\)"):
        ranks(accumulate, "dp=2", True, world_size=2)


def from_meta(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(paceline.World.current().rank)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    wrapped, optimizer, _ = paceline.prepare(model, optimizer, layout=layout)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    wrapped(x).square().mean().backward()
    optimizer.step()
    return whole(model)


def test_models_from_the_meta_device_get_their_values(ranks: Any) -> None:
    alone = from_meta("dp=1")
    for layout in ("dp=2", "dp=2,zero=3"):
        for state in ranks(from_meta, layout, world_size=2):
            torch.testing.assert_close(state, alone)
