"""Several engines in one process: stepped in turn, calling each other's models, one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import TrainingError


class Net(nn.Module):
    """Blocks that are units of their own, and parts that the root holds; one has no dimension."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)) * self.scale


def net(seed: int, outputs: int) -> Net:
    torch.manual_seed(seed)
    return Net(outputs).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (8,), generator=generator)


def mine(step: int, layout: str = "auto") -> tuple[Tensor, Tensor]:
    """This rank's share; ranks that split a model have the same."""
    world = paceline.World.current()
    spread = paceline.Layout.smallest(layout)
    share = (world.rank, world.size) if spread.tp == 1 else (0, 1)
    start, stop = paceline.data.share(8, *share)
    x, y = batch(step)
    return x[start:stop], y[start:stop]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine_for(model: nn.Module, layout: str, **options: Any) -> paceline.Engine:
    if "forward" not in options:
        options["loss"] = F.cross_entropy
    return paceline.Engine(model, optimizer=sgd, layout=layout, **options)


def taking_turns(layout: str) -> list[dict[str, Tensor]]:
    one, other = engine_for(net(0, 3), layout), engine_for(net(1, 3), layout)
    for step in range(3):
        one.step(mine(step, layout))
        other.step(mine(step + 10, layout))
    return [one.whole_parameters(), other.whole_parameters()]


def adversaries(layout: str, *, first: str = "judge", freeze: bool = False) -> Any:
    """A generator whose loss is what the other engine's model says of its results."""
    maker, judge = net(0, 4), net(1, 3)
    judging = engine_for(judge, layout)

    def judged(model: nn.Module, part: Any) -> Tensor:
        x, y = part
        return F.cross_entropy(judge(model(x)), y)

    making = engine_for(maker, layout, forward=judged)
    for step in range(3):
        for turn in ("judge", "maker") if first == "judge" else ("maker", "judge"):
            if turn == "judge":
                judging.step(mine(step, layout))
                continue
            if freeze:
                judge.requires_grad_(False)
            making.step(mine(step + 10, layout))
            if freeze:
                judge.requires_grad_(True)
    return [making.whole_parameters(), judging.whole_parameters()]


def student(layout: str) -> Any:
    pupil, teacher = net(0, 3), net(1, 3)
    teaching = engine_for(teacher, layout)

    def distil(model: nn.Module, part: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(part[0])
        return (model(part[0]) - wanted).square().mean()

    learning = engine_for(pupil, layout, forward=distil)
    for step in range(2):
        learning.step(mine(step, layout))
        teaching.step(mine(step + 10, layout))
        with torch.no_grad():
            teacher.norm(torch.ones(2, 8, dtype=torch.float64))  # a part of it alone
    return [learning.whole_parameters(), teaching.whole_parameters()]


CASES = {
    "taking turns": taking_turns,
    "adversaries": adversaries,
    "the generator first": lambda layout: adversaries(layout, first="maker"),
    "with the judge frozen": lambda layout: adversaries(layout, first="maker", freeze=True),
    "a teacher": student,
}


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.world(2)
def test_engines_share_a_process(layout: str, ranks: Any) -> None:
    def job() -> dict[str, Any]:
        return {name: case(layout) for name, case in CASES.items()}

    found = ranks(job)[1]
    for name, case in CASES.items():
        for parameters, expected in zip(found[name], case("dp=1"), strict=True):
            for key, value in expected.items():
                torch.testing.assert_close(
                    parameters[key], value, rtol=1e-8, atol=1e-9, msg=f"{name}: {key}"
                )


@pytest.mark.world(2)
def test_a_first_step_that_fails_tells_why(ranks: Any) -> None:
    def job(layout: str) -> tuple[str, float]:
        def broken(model: nn.Module, part: Any) -> Tensor:
            if fails:
                raise ValueError("no such column")
            return F.cross_entropy(model(part[0]), part[1])

        fails = True
        engine = engine_for(net(0, 3), layout, forward=broken)
        with pytest.raises(ValueError, match="no such column"):
            engine.step(mine(0))
        fails = False
        return engine.step(mine(0)).loss

    alone = engine_for(net(0, 3), "dp=1").step(batch(0)).loss
    for layout in ("dp=2,zero=1", "dp=2,zero=3"):
        assert ranks(job, layout) == pytest.approx([alone, alone])


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.world(2)
def test_a_second_engine_on_a_spread_model_is_refused_in_words(layout: str, ranks: Any) -> None:
    def job() -> list[str]:
        def batch_of(engine: paceline.Engine) -> Any:
            return mine(0) if engine.layout.dp == 2 else batch(0)

        model = net(0, 3)
        engine = engine_for(model, layout)
        engine.step(batch_of(engine))
        told = []
        for again in (model, nn.Sequential(model, nn.Linear(3, 3).double())):
            for other in (layout, "dp=2"):
                try:
                    engine_for(again, other)
                except TrainingError as error:
                    told.append(str(error))
        engine.step(batch_of(engine))  # the first one goes on
        # One engine after another: the whole state goes over into a model of its own.
        new = net(5, 3)
        new.load_state_dict(engine.state_dict()["model"])
        following = engine_for(new, layout)
        following.step(batch_of(following))
        return told

    for told in ranks(job):
        assert len(told) == 4
        for text in told:
            assert "is spread already" in text
            assert "engine.state_dict()" in text
