"""A run that was interrupted ends where one that never was does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

STEPS = 7


class Noisy(Dataset[Any]):
    """Samples with random augmentation, which name themselves."""

    def __init__(self, n: int, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(n, 6, generator=g, dtype=dtype)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(6, dtype=self.x.dtype)
        return self.x[index] + 0.1 * noise, torch.tensor([int(self.y[index]), index + 1])


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target[:, 0])


class Average:
    """An average of the weights, as people keep beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for name, parameter in self._model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": self.weights, "big": torch.ones(2000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.weights = state["updates"], state["weights"]
        assert state["big"].sum() == 2000


class Follow(paceline.Callback):
    """Keeps the average up to date; presses Ctrl-C after a step."""

    def __init__(self, average: Average, interrupt_at: int | None) -> None:
        self._average, self._interrupt_at = average, interrupt_at
        self.seen: list[int] = []

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self._average.update()
        self.seen.append(trainer.step)
        if trainer.step == self._interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def run_everything(run_dir: Path, interrupt_at: int | None, resume: bool) -> Any:
    """Loader workers, accumulation, a scaler, dropout, a schedule, evaluation, all at once."""
    torch.manual_seed(0)
    model = Net(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = Average(model)
    follow = Follow(average, interrupt_at)
    trainer = paceline.Trainer(
        model,
        optimizer=optimizer,
        loss=loss,
        run_dir=run_dir,
        seed=1,
        global_batch=10,
        microbatch=2,
        precision="fp16",
        clip_norm=0.5,
        sync_batchnorm=True,
        schedule=paceline.schedules.every(
            "step", torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        ),
        data=paceline.DataOptions(workers=1),
        evaluation=paceline.Evaluation(every=3),
        checkpoint=paceline.Checkpointing(every=2, memory_every=1),
        callbacks=[follow, paceline.EarlyStopping(patience=99)],
        objects={"average": average},
        progress=False,
    )
    try:
        history = trainer.fit(Noisy(33), Noisy(9), steps=STEPS, resume=resume)
    except KeyboardInterrupt:
        return None
    return {
        "losses": history.losses,
        "evals": history.metric(),
        "rates": [step.lr for step in history.steps],
        "weights": {name: p.detach().clone() for name, p in model.state_dict().items()},
        "average": average.state_dict(),
        "seen": follow.seen,
        "random": torch.get_rng_state(),
    }


def interrupted_everywhere(root: Path) -> Any:
    whole = run_everything(root / "whole", None, resume=False)
    for step in range(1, STEPS):
        run_dir = root / f"at-{step}"
        assert run_everything(run_dir, step, resume=False) is None
        assert_same(run_everything(run_dir, None, resume=True), whole, f"after step {step}")
    return whole["losses"]


def assert_same(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}: {key}")
    else:
        assert found == wanted, where


@pytest.mark.world(2)
def test_interrupted_at_any_step_with_everything_on(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(interrupted_everywhere, tmp_path, timeout=170)
    assert first == second
    assert len(first) == STEPS
    assert not list(Path("/dev/shm").glob(f"paceline-*{tmp_path.name}*"))


EPOCHS, SAMPLES = 3, 22


def some_steps(run_dir: Path, steps: int, resume: bool) -> Any:
    """This rank's sample ids, step by step, and the losses so far."""
    drawn: list[list[int]] = []

    def noting_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        drawn.append([name - 1 for name in target[:, 1].tolist() if name])  # 0: a placeholder
        return loss(output, target)

    torch.manual_seed(0)
    model = Net(dropout=0.0)
    trainer = paceline.Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=noting_loss,
        run_dir=run_dir,
        global_batch=5,
        precision="fp64",
        sync_batchnorm=True,
        progress=False,
    )
    history = trainer.fit(Noisy(SAMPLES, torch.float64), steps=steps, resume=resume)
    return [index for ids in drawn for index in ids], history.losses


def test_four_ranks_then_three_then_one_then_four(ranks: Any, tmp_path: Path) -> None:
    per_epoch = -(-SAMPLES // 5)
    total = EPOCHS * per_epoch
    [(_, wanted)] = ranks(some_steps, tmp_path / "one", total, False, world_size=1)
    seen: list[int] = []
    losses: list[float] = []
    stops = [(4, 4), (3, 7), (1, 11), (4, total)]
    for number, (size, stop) in enumerate(stops):
        results = ranks(some_steps, tmp_path / "many", stop, number > 0, world_size=size)
        seen += [index for ids, _ in results for index in ids]
        losses = results[0][1]
    assert losses == pytest.approx(wanted, rel=1e-9)
    counts = [seen.count(index) for index in range(SAMPLES)]
    assert counts == [EPOCHS] * SAMPLES
