"""Freezing and unfreezing between steps is followed on every layout, as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import TrainingError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (8,), generator=generator)


def share_of(whole: Any, layout: Any) -> Any:
    place = layout.coordinate(paceline.World.current().rank)
    start, stop = paceline.data.share(len(whole[0]), place.dp, layout.dp)
    return tuple(t[start:stop] for t in whole)


def make_engine(layout: str, **options: Any) -> paceline.Engine:
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for part in (model.stem, model.blocks[0]):
        part.requires_grad_(False)
    return paceline.Engine(
        model, loss=F.cross_entropy, optimizer=optimizer, layout=layout, **options
    )


def change(engine: paceline.Engine, step: int) -> None:
    """Unfreezes a whole unit and a part of one, freezes another, and back."""
    model = engine.model
    if step == 1:
        model.blocks[0].requires_grad_(True)
        model.stem.bias.requires_grad_(True)
    if step == 3:
        model.blocks[1].requires_grad_(False)
        model.head.bias.requires_grad_(False)
        model.stem.requires_grad_(True)
    if step == 4:
        model.blocks[1].requires_grad_(True)


def train(layout: str, **options: Any) -> tuple[dict[str, Tensor], dict[Any, Any]]:
    engine = make_engine(layout, **options)
    for step in range(6):
        change(engine, step)
        engine.step(share_of(batch(step), engine.layout))
    return engine.whole_parameters(), engine.state_dict()["optimizer"]["state"]


LAYOUTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.world(2)
def test_two_ranks_follow(layout: str, ranks: Any) -> None:
    _compare(ranks(train, layout)[1])


@pytest.mark.parametrize(
    "layout", ["dp=4,zero=3,replicas=2", "dp=2,zero=2,pp=2", "dp=2,zero=3,tp=2"]
)
@pytest.mark.world(4)
def test_four_ranks_follow(layout: str, ranks: Any) -> None:
    _compare(ranks(train, layout)[3])


def _compare(found: tuple[dict[str, Tensor], dict[Any, Any]]) -> None:
    (parameters, state), (expected, expected_state) = found, train("dp=1")
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-8, atol=1e-9, msg=name)
    assert state.keys() == expected_state.keys()
    for number, entry in expected_state.items():
        torch.testing.assert_close(state[number], entry, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2"])
@pytest.mark.world(2)
def test_compressed_gradients_follow(layout: str, ranks: Any) -> None:
    parameters, _ = ranks(lambda: train(layout, compress="fp16"))[0]
    for name, value in train("dp=1")[0].items():
        torch.testing.assert_close(parameters[name], value, rtol=0.02, atol=0.02, msg=name)


@pytest.mark.world(2)
def test_what_was_unfrozen_goes_through_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    def job(layout: str, folder: str, steps: int, restore: bool) -> dict[str, Tensor]:
        engine = make_engine(layout)
        with paceline.Checkpoints(folder, engine) as checkpoints:
            if restore:
                checkpoints.restore()
                for step in range(engine.steps_done):
                    change(engine, step)
            for step in range(engine.steps_done, steps):
                change(engine, step)
                engine.step(share_of(batch(step), engine.layout))
            checkpoints.save(wait=True)
        return engine.whole_parameters()

    folder = str(tmp_path / "checkpoints")
    ranks(job, "dp=2,zero=3", folder, 2, False)
    found = ranks(job, "dp=2,zero=1", folder, 6, True)[1]
    for name, value in train("dp=1")[0].items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.world(2)
def test_parameters_that_join_the_optimizer_later_are_saved_with_it(
    layout: str, ranks: Any, tmp_path: Path
) -> None:
    def job(layout: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = Model().double()
        model.stem.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=optimizer, layout=layout)
        for step in range(4):
            if step == 2:
                engine.model.stem.requires_grad_(True)
                late = list(engine.model.stem.parameters())
                engine.optimizer.add_param_group({"params": late, "lr": 0.01})
            engine.step(share_of(batch(step), engine.layout))
        with paceline.Checkpoints(folder, engine) as checkpoints:
            checkpoints.save(wait=True)
        return engine.whole_parameters(), engine.state_dict()["optimizer"]

    parameters, saved = ranks(job, layout, str(tmp_path / "spread"))[1]
    expected, expected_saved = job("dp=1", str(tmp_path / "alone"))
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-8, atol=1e-9, msg=name)
    assert [g["params"] for g in saved["param_groups"]] == [
        g["params"] for g in expected_saved["param_groups"]
    ]
    assert saved["state"].keys() == expected_saved["state"].keys()


OPTIONS = {"freeze": ["stem.*", "blocks.2.bias"], "unfreeze_at": {"stem.*": 2, "blocks.0.*": 3}}


def engine_by_rules(layout: str, **options: Any) -> paceline.Engine:
    torch.manual_seed(0)
    return paceline.Engine(
        Model().double(),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
        layout=layout,
        **{**OPTIONS, **options},
    )


def by_hand() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The parameters after each of five steps, in plain torch."""
    torch.manual_seed(0)
    model = Model().double()
    named = dict(model.named_parameters())
    start = {name: value.detach().clone() for name, value in named.items()}
    trained = [value for name, value in named.items() if name != "blocks.2.bias"]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)
    after = []
    for step in range(5):
        for name, value in named.items():
            late = 2 if name.startswith("stem") else 3 if name.startswith("blocks.0") else 0
            value.requires_grad_(step >= late and name != "blocks.2.bias")
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after.append({name: value.detach().clone() for name, value in named.items()})
    return after, start


def run_by_rules(folder: str, layouts: list[str]) -> dict[str, Any]:
    """Five steps; and the last two of them again from a checkpoint of the third."""
    made = {}
    for layout in layouts:
        engine = engine_by_rules(layout)
        after = []
        with paceline.Checkpoints(f"{folder}/{layout}", engine) as checkpoints:
            for step in range(5):
                engine.step(share_of(batch(step), engine.layout))
                after.append(engine.whole_parameters())
                if step == 2:
                    checkpoints.save(wait=True)
        again = engine_by_rules(layout)
        with paceline.Checkpoints(f"{folder}/{layout}", again) as checkpoints:
            checkpoints.restore()
            for step in (3, 4):
                again.step(share_of(batch(step), again.layout))
        resumed = again.whole_parameters()
        exact = all(torch.equal(resumed[name], value) for name, value in after[-1].items())
        made[layout] = after, exact, engine.take_notes()
    return made


@pytest.mark.world(2)
def test_rules_freeze_and_unfreeze_on_every_layout(ranks: Any, tmp_path: Path) -> None:
    expected, start = by_hand()
    layouts = [one for one in LAYOUTS if one != "dp=2,zero=2"]
    for of_rank in ranks(run_by_rules, str(tmp_path), layouts):
        for layout, (after, exact, notes) in of_rank.items():
            for step, values in enumerate(expected):
                for name, value in values.items():
                    torch.testing.assert_close(
                        after[step][name], value, rtol=0, atol=1e-9, msg=f"{layout} {step} {name}"
                    )
            for name, value in start.items():  # weight decay leaves alone what is frozen, too
                until = (
                    {"stem": 2, "bloc": 3}.get(name[:4], 0)
                    if "blocks.0" in name or "stem" in name
                    else 0
                )
                if name == "blocks.2.bias":
                    until = 5
                assert all(torch.equal(after[step][name], value) for step in range(until)), name
            assert exact, layout
            assert any("unfreeze_at: after step 2, stem.weight, stem.bias are" in n for n in notes)


def test_rules_that_fit_nothing_are_refused() -> None:
    with pytest.raises(
        TrainingError, match=r"freeze: 'sten\.\*' matches no parameter of Model\. Did"
    ):
        engine_by_rules("dp=1", freeze="sten.*")
    with pytest.raises(TrainingError, match=r"unfreeze_at: 'tail' matches no parameter of Model"):
        engine_by_rules("dp=1", unfreeze_at={"tail": 3})
    with pytest.raises(TrainingError, match=r"unfreeze_at=\{'stem.*': 0\} must be a dict from"):
        engine_by_rules("dp=1", unfreeze_at={"stem.*": 0})
    with pytest.raises(TrainingError, match=r"freeze=3 must be a pattern of names"):
        engine_by_rules("dp=1", freeze=3)
    with pytest.raises(TrainingError, match="leave none at the start: freeze fewer"):
        engine_by_rules("dp=1", freeze="*")
    model = Model()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with pytest.raises(
        TrainingError, match=r"stem.weight is to be trained from step 2 on, and is not"
    ):
        paceline.Engine(model, loss=F.cross_entropy, optimizer=optimizer, unfreeze_at={"stem.*": 2})
    trainer = paceline.Trainer(
        Model(), loss=F.cross_entropy, optimizer=torch.optim.SGD, global_batch=8, freeze=["hed.*"]
    )
    with pytest.raises(
        TrainingError, match=r"freeze: 'hed\.\*' matches no parameter of Model\. Did"
    ):
        trainer.fit([(torch.zeros(4), 0)] * 8, steps=1, nproc=2)  # before any rank is started


def test_a_trainer_hands_back_what_its_ranks_froze() -> None:
    data = [(x, int(y)) for x, y in zip(*batch(0), strict=True)]
    trainer = paceline.Trainer(
        Model().double(),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        global_batch=8,
        progress=False,
        **OPTIONS,
    )
    trainer.fit(data, steps=3, nproc=2)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert "stem.weight" in trained
    assert "blocks.2.bias" not in trained
    assert "blocks.0.weight" in trained
    trainer.fit(data, steps=3, nproc=1)
