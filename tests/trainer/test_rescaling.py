"""A world that loses and gains ranks trains as one that never did: same losses, samples, dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import paceline
from engine.test_layouts import make_gpt
from paceline import Layout, events
from paceline.config import Config
from paceline.errors import LayoutError
from paceline.layout.fitting import fit
from paceline.models.gpt import token_cross_entropy
from paceline.trainer.history import History
from paceline.trainer.run import from_config, layout_for

SAMPLES, BATCH, EPOCHS = 22, 5, 2
PER_EPOCH = -(-SAMPLES // BATCH)
TOTAL = EPOCHS * PER_EPOCH


class Texts(Dataset[Any]):
    """Random tokens, of which the first is the number of the sample."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 33, (SAMPLES, 9), generator=draw)
        self.tokens[:, 0] = torch.arange(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Lost(Exception):
    """What ends a rank without warning."""


class Follow(paceline.Callback):
    """Keeps the samples of each step; fails after one."""

    def __init__(self, fail_at: int | None) -> None:
        self._fail_at = fail_at
        self.by_step: dict[int, list[int]] = {}

    def on_fit_start(self, trainer: Any) -> None:
        engine = trainer.engine
        step = engine.step
        speaks = (
            engine.coordinate.tp == 0 and engine.coordinate.pp == 0
        )  # the others see the same samples

        def noting_step(batch: Any) -> Any:
            self.by_step[engine.steps_done + 1] = batch[0][:, 0].tolist() if speaks else []
            return step(batch)

        engine.step = noting_step

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.step == self._fail_at:
            raise Lost


def train(
    run_dir: Path,
    asked: str,
    steps: int,
    resume: bool = False,
    fail_at: int | None = None,
    global_batch: int = BATCH,
) -> Any:
    """Train on the layout that this world allows; samples by step, and the losses so far."""
    layout = fit(asked, paceline.World.current().size)
    assert layout is not None
    follow = Follow(fail_at)
    model = make_gpt(layers=2, dropout=0.1)
    trainer = paceline.Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=token_cross_entropy,
        layout=layout,
        precision="fp64",
        clip_norm=0.5,
        global_batch=global_batch,
        run_dir=run_dir,
        callbacks=[follow],
        checkpoint=paceline.Checkpointing(every=2, asynchronous=False),
        progress=False,
    )
    try:
        losses = trainer.fit(Texts(), steps=steps, resume=resume).losses
    except Lost:
        losses = []
    return follow.by_step, losses


LAYOUTS = ["dp=4", "dp=4,zero=2", "dp=4,zero=3,replicas=2", "dp=2,tp=2", "dp=2,pp=2"]
CHANGES = [
    # ranks that are there, steps up to which they train, the step at which they are lost
    (4, TOTAL, 5),  # step 5 was not saved: it is trained again
    (3, 6, None),
    (1, 8, None),
    (4, TOTAL, None),
]


@pytest.fixture(scope="module")
def undisturbed(rank_pool: Any, tmp_path_factory: Any) -> list[float]:
    """The losses of one process that trains from start to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    losses = rank_pool.run(train, folder, "dp=1", TOTAL, world_size=1)[0][1]
    assert len(losses) == TOTAL
    return losses


@pytest.mark.parametrize("asked", LAYOUTS)
def test_losing_and_gaining_ranks_changes_nothing(
    ranks: Any, tmp_path: Path, asked: str, undisturbed: list[float]
) -> None:
    by_step: dict[int, list[int]] = {}
    losses: list[float] = []
    used = []
    for number, (there, steps, fail_at) in enumerate(CHANGES):
        if (layout := fit(asked, there)) is None:
            continue  # the run waits for machines
        used.append(str(layout))
        arguments = tmp_path / "many", asked, steps, number > 0, fail_at
        results = ranks(train, *arguments, world_size=layout.world_size)
        for step in results[0][0]:
            by_step[step] = [index for drawn, _ in results for index in drawn[step]]
        losses = results[0][1]
    assert len(set(used)) > 1
    assert losses == pytest.approx(undisturbed, rel=1e-9)
    for epoch in range(EPOCHS):
        steps_of_epoch = range(epoch * PER_EPOCH + 1, (epoch + 1) * PER_EPOCH + 1)
        seen = [index for step in steps_of_epoch for index in by_step[step]]
        assert sorted(seen) == list(range(SAMPLES)), f"epoch {epoch}"
    # Read from the events, of all attempts together: every step once, with its last values.
    history = History.read(tmp_path / "many")
    assert [step.step for step in history.steps] == list(range(1, TOTAL + 1))
    assert history.losses == losses
    assert [epoch.step for epoch in history.epochs] == [PER_EPOCH, TOTAL]


@pytest.mark.world(3)
@pytest.mark.parametrize("layout", ["dp=3", "dp=3,zero=3"])
def test_restart_at_the_same_size_is_exact_to_the_bit(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    whole = ranks(train, tmp_path / "whole", layout, TOTAL)[0][1]
    for number, fail_at in enumerate((1, 5)):
        ranks(train, tmp_path / "failed", layout, TOTAL, number > 0, fail_at)
    _, losses = ranks(train, tmp_path / "failed", layout, TOTAL, True)[0]
    assert losses == whole


@pytest.mark.parametrize("asked", ["auto", "zero=3", "pp=2"])
def test_world_that_grows_beyond_the_batch(ranks: Any, tmp_path: Path, asked: str) -> None:
    """Some ranks get no samples then; they go along."""
    least, most = (2, 6) if "pp" in asked else (1, 3)
    whole = ranks(train, tmp_path / "one", asked, 6, False, None, 2, world_size=least)[0][1]
    ranks(train, tmp_path / "many", asked, 3, False, None, 2, world_size=least)
    results = ranks(train, tmp_path / "many", asked, 6, True, None, 2, world_size=most)
    assert results[0][1] == pytest.approx(whole, rel=1e-9)
    for step in (4, 5, 6):
        assert sum(len(drawn[step]) for drawn, _ in results) == 2


def small_config(**options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"args": {"vocab_size": 256, "context": 16, "layers": 1, "heads": 2,
                               "width": 16}},
            "data": {"args": {"context": 16, "max_bytes": 40_000}},
            "batch": {"global_batch": 6},
            "train": {"steps": 4, "eval_batches": 1},
            "schedule": {"warmup_steps": 0},
            "precision": "fp64",
            "launch": {"device": "cpu", "timeout": 240.0},  # as the pool's
            **options,
        }
    )  # fmt: skip


def run_config(run_dir: Path, layout: str, steps: int, resume: bool) -> list[float]:
    config = small_config(layout=layout, train={"steps": steps, "eval_batches": 1})
    return from_config(config, run_dir, resume=resume).losses


def test_config_runs_on_what_is_there_and_says_so(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(run_config, tmp_path / "whole", "dp=3", 4, False, world_size=3)[0]
    ranks(run_config, tmp_path / "run", "dp=3", 2, False, world_size=3)
    losses = ranks(run_config, tmp_path / "run", "dp=3", 4, True, world_size=2)[0]
    # The schedule of the first two steps was that of a run of two.
    assert losses[0] == whole[0]
    assert len(losses) == 4
    started = [e for e in events.read(tmp_path / "run") if isinstance(e, events.RunStarted)]
    assert [(e.layout, e.world_size, e.first_step) for e in started] == [
        ("dp=3", 3, 0),
        ("dp=2", 2, 2),
    ]
    told = [e.message for e in events.read(tmp_path / "run") if isinstance(e, events.Note)]
    assert "goes on as dp=2 (asked for: dp=3)" in told
    assert not any(
        "asked for" in m for m in told[: told.index("goes on as dp=2 (asked for: dp=3)")]
    )


def test_layout_of_a_config_by_the_number_of_ranks() -> None:
    assert layout_for(small_config(layout="dp=4,tp=2"), 6) == Layout(dp=3, tp=2)
    assert layout_for(small_config(layout="auto"), 5) == Layout(dp=5)
    with pytest.raises(LayoutError, match="'dp=4,tp=2' does not fit on 1 rank, not even with dp=1"):
        layout_for(small_config(layout="dp=4,tp=2"), 1)
