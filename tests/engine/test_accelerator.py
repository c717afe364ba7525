"""`Accelerator`: a loop of one's own, the same on any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import CheckpointError, TrainingError

N = 23


def parts(batch: int = 6) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(data, batch_size=batch, shuffle=True)


def whole(accelerator: paceline.Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    return accelerator.state_dict(model)


def train(
    layout: str = "auto",
    accumulate: int = 3,
    count: bool = False,
    zero_first: bool = False,
    epochs: int = 2,
) -> dict[str, torch.Tensor]:
    """A loop with accumulation, clipping, a schedule and a short last batch."""
    model, optimizer, loader = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    accelerator = paceline.Accelerator(accumulate=accumulate, layout=layout)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    norms = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                if zero_first:
                    optimizer.zero_grad()
                weights = torch.ones(len(y)) if not count else (y + 1).to(torch.float32)
                losses = F.cross_entropy(model(x), y, reduction="none")
                loss = (losses * weights).sum() / weights.sum()
                accelerator.backward(loss, count=weights.sum() if count else None)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                norms += [] if norm is None else [norm.detach().clone()]
                optimizer.step()
                schedule.step()
                if not zero_first:
                    optimizer.zero_grad()
    assert accelerator.steps_done == epochs * -(-4 // accumulate) == len(norms)
    found = whole(accelerator, model) | {"norms": torch.stack(norms)}
    return found | {"lr": torch.tensor(schedule.get_last_lr())}


def by_hand(accumulate: int = 3, count: bool = False) -> dict[str, torch.Tensor]:
    """The same in plain torch, on the whole of each step at once."""
    model, optimizer, loader = parts()
    data = loader.dataset
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    ours = paceline.loader(data, global_batch=6 * accumulate, seed=0)
    norms = []
    for _ in range(2):
        for x, y in ours:
            weights = torch.ones(len(y)) if not count else (y + 1).to(torch.float32)
            losses = F.cross_entropy(model(x), y, reduction="none")
            ((losses * weights).sum() / weights.sum()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    found = model.state_dict() | {"norms": torch.stack(norms)}
    return found | {"lr": torch.tensor(schedule.get_last_lr())}


CASES = [
    {"accumulate": 1},
    {"accumulate": 3},
    {"accumulate": 3, "zero_first": True},
    {"accumulate": 3, "count": True},
]


def all_cases(layouts: list[str]) -> list[dict[str, torch.Tensor]]:
    return [train(layout, **case) for layout in layouts for case in CASES]  # type: ignore[arg-type]


def expected(times: int) -> list[dict[str, torch.Tensor]]:
    return times * [by_hand(case["accumulate"], bool(case.get("count"))) for case in CASES]


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_one_process_is_plain_torch() -> None:
    same(all_cases(["auto"]), expected(1))


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_and_zero_train_the_same_model(ranks: Any, size: int) -> None:
    layouts = ["auto", *(f"dp={size},zero={stage}" for stage in (1, 2, 3))]
    wanted = expected(len(layouts))
    for found in ranks(all_cases, layouts, world_size=size):
        same(found, wanted)


def gan(layout: str, accumulate: int = 1) -> dict[str, torch.Tensor]:
    """Two models and two optimizers that take turns, each loss going through both models."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    of_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(N, 4, generator=g, dtype=torch.float64),
        torch.randn(N, 3, generator=g, dtype=torch.float64),
    )
    loader = DataLoader(data, batch_size=6, shuffle=True)
    accelerator = paceline.Accelerator(layout=layout, accumulate=accumulate)
    generator, discriminator, of_g, of_d, loader = accelerator.prepare(
        generator, discriminator, of_g, of_d, loader
    )
    for _ in range(2):
        for real, noise in loader:
            with accelerator.accumulate(generator, discriminator):
                fake = generator(noise)
                for p in discriminator.parameters():
                    p.requires_grad_(True)
                of_d.zero_grad()
                loss = F.softplus(-discriminator(real)).mean()
                loss = loss + F.softplus(discriminator(fake.detach())).mean()
                accelerator.backward(loss)
                of_d.step()
                for p in discriminator.parameters():
                    p.requires_grad_(False)
                of_g.zero_grad()
                accelerator.backward(F.softplus(-discriminator(fake)).mean())
                of_g.step()
    found = {f"g.{n}": v for n, v in accelerator.state_dict(generator).items()}
    return found | {f"d.{n}": v for n, v in accelerator.state_dict(discriminator).items()}


def gans(layouts: list[str]) -> list[dict[str, torch.Tensor]]:
    return [gan(layout, passes) for layout in layouts for passes in (1, 2)]


def test_a_gan_trains_the_same_on_any_number_of_ranks(ranks: Any) -> None:
    alone = gans(["dp=1"])
    for size, layouts in (
        (2, ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"]),
        (4, ["dp=4"]),
    ):
        for found in ranks(gans, layouts, world_size=size):
            same(found, alone * len(layouts))


def evaluate() -> dict[str, Any]:
    """Everything that is asked about ranks: metrics, printing, order."""
    model, optimizer, _ = parts()
    data = [(torch.tensor([float(i)] * 4, dtype=torch.float64), i, f"text {i}") for i in range(N)]
    accelerator = paceline.Accelerator(accumulate=4, batch_size_is="global")
    loader = DataLoader(data, batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen, losses, texts = [], [], []
    for x, number, text in loader:
        loss = model(x).mean()
        found = accelerator.gather_for_metrics({"x": x[:, 0], "number": number, "text": list(text)})
        torch.testing.assert_close(found["x"], found["number"].double())
        seen += found["number"].tolist()
        texts += found["text"]
        repeated = accelerator.gather_for_metrics(loss.detach().repeat(6))
        assert torch.equal(repeated, accelerator.gather_for_metrics(loss))
        losses += repeated.tolist()
    with pytest.raises(TrainingError, match=r"gather_for_metrics: a tensor of shape \(9,\) for a"):
        accelerator.gather_for_metrics(torch.arange(9))
    everyone = accelerator.gather(torch.tensor(accelerator.world.rank))
    assert everyone.tolist() == list(range(accelerator.world.size))
    assert accelerator.unwrap(model).state_dict().keys() == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    with accelerator.no_sync(), accelerator.main_process_first():
        accelerator.print("once")
    return {"seen": seen, "texts": texts, "mean": sum(losses) / len(losses)}


def test_metrics_have_every_sample_once_and_in_order(ranks: Any) -> None:
    alone = evaluate()
    assert alone["seen"] == list(range(N))
    assert alone["texts"] == [f"text {i}" for i in range(N)]
    for size in (2, 4):
        for found in ranks(evaluate, world_size=size):
            assert found["seen"] == alone["seen"]
            assert found["texts"] == alone["texts"]
            assert found["mean"] == pytest.approx(alone["mean"])


def overflowing(layout: str) -> dict[str, Any]:
    """fp16, with one sample that overflows on the rank that has it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=g)
    x[5] = 1e6
    data = TensorDataset(x, torch.zeros(N, dtype=torch.long))
    accelerator = paceline.Accelerator(
        precision="fp16",
        layout=layout,
        accumulate=2,
        loss_scaling=paceline.LossScaling(init_scale=1024.0, growth_interval=2),
    )
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True), schedule
    )
    skipped, norms, rates = [], [], []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate():
                output = model(x)
                assert output.dtype == torch.float32
                accelerator.backward(F.cross_entropy(output, y))
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.step_was_skipped(optimizer))
                rates.append(schedule.get_last_lr()[0])
                norms.append(float(norm) if not skipped[-1] else 0.0)
    return {
        "skipped": skipped,
        "scale": accelerator.loss_scale,
        "rates": rates,
        "norms": torch.tensor(norms),
        "weights": accelerator.state_dict(model),
    }


def test_an_overflow_leaves_the_step_out_on_all_ranks(ranks: Any) -> None:
    alone = overflowing("dp=1")
    left_out = alone["skipped"]
    assert sum(left_out) == 3 < len(left_out)  # once an epoch
    assert len(set(alone["rates"])) == len(left_out) - 3 + left_out[0]  # the schedule waits
    for size, layout in ((2, "dp=2"), (2, "dp=2,zero=3"), (4, "dp=4,zero=2")):
        for found in ranks(overflowing, layout, world_size=size):
            assert found["skipped"] == left_out
            torch.testing.assert_close(found, alone, rtol=2e-2, atol=2e-3)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def resumable(
    layout: str, folder: str, stop_at: int | None = None, precision: str = "fp32", steps: int = 8
) -> dict[str, Any]:
    """Trains up to a step, saving at ``stop_at``; goes on from what is in ``folder``."""
    model, optimizer, loader = parts(batch=4)
    model.float()
    data = TensorDataset(loader.dataset.tensors[0].float(), loader.dataset.tensors[1])
    loader = DataLoader(data, batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    counter = Counter()
    accelerator = paceline.Accelerator(layout=layout, accumulate=2, precision=precision)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.register_for_checkpointing(counter=counter)
    with pytest.raises(CheckpointError, match="load_state: there is no state in"):
        accelerator.load_state(folder + "-elsewhere")
    accelerator.load_state(folder, required=False)
    while accelerator.steps_done < steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                with pytest.raises(TrainingError, match="save_state: in the middle of a step"):
                    accelerator.save_state(folder)
                continue
            counter.value += 1
            assert counter.value == accelerator.steps_done
            if accelerator.steps_done == stop_at:
                accelerator.save_state(folder)
                return {}
            if accelerator.steps_done == steps:
                break
    scaler = [] if precision != "fp16" else [accelerator.loss_scale]
    return {
        **accelerator.state_dict(model),
        "lr": torch.tensor(schedule.get_last_lr()),
        "epoch": loader.epoch,
        "scaler": scaler,
    }


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_saved_loop_goes_on_at_another_size_and_layout(
    ranks: Any, tmp_path: Path, precision: str
) -> None:
    straight = resumable("auto", str(tmp_path / "none"), None, precision)
    places = [(2, "dp=2"), (1, "dp=1"), (4, "dp=4,zero=3"), (2, "dp=2,zero=2")]
    for size, layout in places[:1] if precision == "fp16" else places[:2]:
        folder = str(tmp_path / f"{size} {layout}")
        ranks(resumable, layout, folder, 5, precision, world_size=size)
        for other, elsewhere in places[1:3]:
            for found in ranks(resumable, elsewhere, folder, None, precision, world_size=other):
                exact = (
                    {"rtol": 1e-5, "atol": 1e-6}
                    if precision == "fp32"
                    else {"rtol": 0.02, "atol": 2e-3}
                )
                torch.testing.assert_close(found, straight, **exact)


def plateau(folder: str, stop_at: int | None = None, plain: bool = False) -> Any:
    """By a metric, after each epoch; each rank has seen another one, and rank 0's counts."""
    model, optimizer, loader = parts()
    schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    if plain:
        rates = []
        for loss in LOSSES:
            schedule.step(loss)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates
    accelerator = paceline.Accelerator(batch_size_is="global")
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.load_state(folder, required=False)
    rates = []
    for epoch in range(loader.epoch, len(LOSSES)):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step(torch.tensor(LOSSES[epoch]) + accelerator.world.rank)
        rates.append(optimizer.param_groups[0]["lr"])
        if epoch + 1 == stop_at:
            accelerator.save_state(folder)
            break
    return rates


LOSSES = [1.0, 0.9, 0.95, 0.97, 0.96, 0.94, 0.99, 0.98]


def test_reduce_on_plateau_goes_by_rank_0s_metric_and_on_after_a_resume(
    ranks: Any, tmp_path: Path
) -> None:
    def job() -> list[Any]:
        whole = plateau(str(tmp_path / "none"))
        # After one bad epoch: what it has counted is in the state.
        return [whole, plateau(str(tmp_path / "state"), 3) + plateau(str(tmp_path / "state"))]

    wanted = plateau("", plain=True)
    assert len(set(wanted)) > 2
    for whole, resumed in ranks(job, world_size=2):
        assert whole == wanted
        assert resumed == wanted


def test_two_models_are_saved_together(ranks: Any, tmp_path: Path) -> None:
    def job(layout: str, scale: float) -> list[Any]:
        torch.manual_seed(0)
        models = [nn.Linear(4, 2), nn.Linear(4, 3)]
        for model in models:
            with torch.no_grad():
                model.weight.mul_(scale)
        both = torch.optim.Adam([p for m in models for p in m.parameters()])
        accelerator = paceline.Accelerator(layout=layout)
        *models, both = accelerator.prepare(*models, both)
        if scale == 1:
            accelerator.backward(sum(m(torch.ones(2, 4)).square().mean() for m in models))
            both.step()
            accelerator.save_state(tmp_path / "two")
        else:
            accelerator.load_state(tmp_path / "two")
            assert len(both.state) == 4
        return [accelerator.state_dict(model) for model in models]

    wanted = ranks(job, "dp=2", 1.0, world_size=2)[0]
    for found in ranks(job, "dp=2,zero=3", 3.0, world_size=2):
        torch.testing.assert_close(found, wanted)


def test_wrong_uses_are_answered(ranks: Any) -> None:
    model, optimizer, _ = parts()
    with pytest.raises(TrainingError, match=r"argument mixed_precision.*precision="):
        paceline.Accelerator(mixed_precision="bf16")
    with pytest.raises(TrainingError, match=r"gradient_accumulation_steps.*accumulate"):
        paceline.Accelerator(gradient_accumulation_steps=2)
    with pytest.raises(TrainingError, match="batch_size_is='mine' must be 'global'"):
        paceline.Accelerator(batch_size_is="mine")
    accelerator = paceline.Accelerator()
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    with pytest.raises(TrainingError, match="do not belong to the model"):
        accelerator.prepare(model, stranger)
    with pytest.raises(TrainingError, match=r"was not prepared. Pass both in one call"):
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(stranger, 2))
    with pytest.raises(TrainingError, match=r"every\('epoch', …\) is for Engine and Trainer"):
        accelerator.prepare(paceline.schedules.every("epoch", torch.optim.lr_scheduler.StepLR))
    with pytest.raises(TrainingError, match=r"got a list of parts; give them one by one, as in"):
        accelerator.prepare([model, optimizer])
    with pytest.raises(TrainingError, match="got a dict of parts"):
        accelerator.prepare({"model": model})
    prepared = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    prepared(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(TrainingError, match=r"there was no accelerator.backward\(loss\) since"):
        optimizer.step()
    with pytest.raises(TrainingError, match="was prepared already"):
        accelerator.prepare(model)
    with pytest.raises(AttributeError, match=r"'unwrap_model': use accelerator.unwrap\(model\)"):
        accelerator.unwrap_model(prepared)
    for wrong in (1.0, torch.ones(())):
        with pytest.raises(TrainingError, match="a loss tensor that has a gradient"):
            accelerator.backward(wrong)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"register_for_checkpointing\(adamw=…\)"):
        accelerator.register_for_checkpointing(optimizer)

    def said() -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline").addHandler(handler)
        _, _, loader = parts()
        paceline.Accelerator(accumulate=2).prepare(loader)
        return lines

    first, second = ranks(said, world_size=2)
    assert first == [
        "DataLoader(batch_size=6): that is the global batch, 3 samples on each of 2 ranks. A step "
        "takes 2 batches, 12 samples. For 6 on each rank make "
        "Accelerator(batch_size_is='per_device'); if it is meant so, 'global'."
    ]
    assert second == []
